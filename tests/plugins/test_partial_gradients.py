"""A checkpoint written between two micro-batches holds the gradients of those that have run."""

import warnings

import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint, OnExceptionCheckpoint
from support import CASES, FP16_HALF, Net, Samples, assert_same, level_of, loader, plugin, stateful_loader, train

from nemo_lowprec.checkpoint.sharded_folder import in_full
from nemo_lowprec.data.loader import ResumableLoader
from nemo_lowprec.strategies import LowPrecisionShardedStrategy
from nemo_lowprec.tensors import GradientTensor
from nemo_lowprec.tensors.dtensor import local_shard
from tests.processes import on_processes

LOST = "between two micro-batches of a step, whose gradients so far it does not hold"
OPTIONS = {"max_steps": 4, "max_epochs": -1, "accumulate_grad_batches": 3, "gradient_clip_val": 1.0}


class SaveAfter(Callback):
    """Saves when so many micro-batches have run."""

    def __init__(self, path, batches):
        self.path, self.batches = path, batches

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if trainer.fit_loop.epoch_loop.total_batch_idx + 1 == self.batches:
            trainer.save_checkpoint(self.path)


def net(**options):
    return Net(dropout=0.2, stepwise=True, **options)


def dynamic(case):
    options = {"loss_scale": None, "initial_loss_scale": 2.0**12, "loss_scale_window": 2}
    return plugin(case, **(options if level_of(case).has_loss_scale else {}))


def data(batch_size=2):
    return stateful_loader(batch_size=batch_size, count=24)


@pytest.fixture(autouse=True)
def nothing_is_lost(request):
    with warnings.catch_warnings():
        if "lost" not in request.node.name:
            warnings.filterwarnings("error", LOST)
        yield


@pytest.mark.parametrize("case", [*CASES, *FP16_HALF])
def test_a_run_goes_on_bit_for_bit(case, tmp_path):
    whole = train(net(), dynamic(case), data=data(), **OPTIONS)
    for batches in (4, 5) if case == "msamp_o2" else (5,):  # one and two micro-batches of the second step
        path = tmp_path / f"{batches}.ckpt"
        train(net(), dynamic(case), SaveAfter(path, batches), data=data(), **OPTIONS | {"max_steps": 2})
        torch.rand(5)
        resumed = train(net(), dynamic(case), data=data(), ckpt=path, **OPTIONS)
        assert_same(resumed.state, whole.state)
        saved = torch.load(path, weights_only=True)["LowPrecision"]["partial_gradients"]["grads"]
        assert saved.keys() == {name for name, p in net().named_parameters() if p.requires_grad}


def test_validation_in_the_middle_of_a_step(tmp_path):
    """A loss that is best there."""
    options = OPTIONS | {"val_check_interval": 4, "check_val_every_n_epoch": None}
    both = lambda: (data(), loader(count=8))  # noqa: E731
    whole = train(net(), "msamp_o2", data=both(), **options)
    saving = ModelCheckpoint(tmp_path, "x", "val/loss")
    train(net(), "msamp_o2", saving, data=both(), **options | {"max_steps": 2})
    path = tmp_path / "x.ckpt"
    assert torch.load(path, weights_only=True)["global_step"] == 1
    assert_same(train(net(), "msamp_o2", data=both(), ckpt=path, **options).state, whole.state)


def test_there_is_nothing_between_two_steps(tmp_path):
    train(net(), "bf16_mixed", SaveAfter(tmp_path / "x.ckpt", 3), data=data(), **OPTIONS | {"max_steps": 2})
    assert "partial_gradients" not in torch.load(tmp_path / "x.ckpt", weights_only=True)["LowPrecision"]


class Manual(Net):
    """Steps after every second batch by hand."""

    automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        if batch_idx % 2 == 0:
            optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        if batch_idx % 2 == 1:
            optimizer.step()


@pytest.mark.parametrize("case", ["bf16_mixed", "fp16_mixed", "msamp_o2", "msamp_o3"])
def test_manual_optimization(case, tmp_path):
    options = {"max_steps": 4, "max_epochs": -1}
    whole = train(Manual(), dynamic(case), data=data(), **options)
    train(Manual(), dynamic(case), SaveAfter(tmp_path / "x.ckpt", 3), data=data(), **options | {"max_steps": 2})
    assert_same(train(Manual(), dynamic(case), data=data(), ckpt=tmp_path / "x.ckpt", **options).state, whole.state)


class Direct(Manual):
    """Calls ``loss.backward()``."""

    def manual_backward(self, loss):
        loss.backward()


class TwoSpeeds(Net):
    """The first optimizer steps after every batch, the second one after every third."""

    automatic_optimization = False

    def configure_optimizers(self):
        halves = [[*self.inp.parameters(), *self.norm.parameters()], [*self.mid.parameters(), *self.head.parameters()]]
        return [torch.optim.AdamW(half, lr=1e-2) for half in halves]

    def training_step(self, batch, batch_idx):
        fast, slow = self.optimizers()
        fast.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        fast.step()
        if batch_idx % 3 == 2:
            slow.step()
            slow.zero_grad()


@pytest.mark.parametrize(("model", "case"), [(Direct, "bf16_mixed"), (Direct, "te_fp8"), (Direct, "msamp_o2"),
                                             (TwoSpeeds, "bf16_mixed"), (TwoSpeeds, "msamp_o2")])  # fmt: skip
def test_manual_optimization_without_the_plugin_or_with_two_optimizers(model, case, tmp_path):
    options = {"max_steps": 8, "max_epochs": -1}
    whole = train(model(), plugin(case), data=data(), **options)
    train(model(), plugin(case), SaveAfter(tmp_path / "x.ckpt", 5), data=data(), **options)
    saved = torch.load(tmp_path / "x.ckpt", weights_only=True)["LowPrecision"]["partial_gradients"]["grads"]
    slow = {"mid.weight", "head.weight", "head.bias"}
    assert saved.keys() == (slow if model is TwoSpeeds else {name for name, _ in model().named_parameters()})
    assert_same(train(model(), plugin(case), data=data(), ckpt=tmp_path / "x.ckpt", **options).state, whole.state)


class Breaks(Net):
    """In the forward or the backward pass of the fifth micro-batch."""

    def __init__(self, where):
        super().__init__(dropout=0.2, stepwise=True)
        self.where, self.calls = where, 0

    def training_step(self, batch, batch_idx):
        self.calls += 1
        if self.calls == 5 and self.where == "forward":
            raise InterruptedError
        loss = super().training_step(batch, batch_idx)
        if self.calls == 5:
            loss.register_hook(lambda grad: (_ for _ in ()).throw(InterruptedError))
        return loss


@pytest.mark.parametrize("where", ["forward", "backward, whose part is lost"])
def test_what_is_saved_where_an_error_has_stopped_a_micro_batch(where, tmp_path):
    """The gradients of the one before; where a pass has begun, nothing, which is said."""
    saving = OnExceptionCheckpoint(tmp_path, "x")
    with pytest.raises(InterruptedError), warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        train(Breaks(where), "msamp_o2", saving, data=data(), enable_checkpointing=True, **OPTIONS)
    saved = torch.load(tmp_path / "x.ckpt", weights_only=True)["LowPrecision"]["partial_gradients"]
    said = sum(LOST in str(w.message) for w in seen)
    assert (bool(saved), said) == ((True, 0) if where == "forward" else (False, 1))


class Gradients(Callback):
    """Those that the first step is made with, as FP32."""

    grads = None

    def on_before_optimizer_step(self, trainer, module, optimizer):
        if self.grads is None:
            self.grads = {
                n: (g.dequantize() if isinstance(g := local_shard(p.grad), GradientTensor) else g).float().clone()
                for n, p in module.named_parameters() if p.grad is not None
            }  # fmt: skip


def first_gradients(case, *callbacks, ckpt=None, batches=None, **options):
    seen = Gradients()
    options = OPTIONS | {"max_steps": 1, "gradient_clip_val": None} | options
    train(Net(), plugin(case), seen, *callbacks, data=batches or data(), ckpt=ckpt, **options)
    return seen.grads


def close(got, want, bound):
    return all((got[n] - want[n]).norm() <= bound * want[n].norm() + 1e-12 for n in want) and got.keys() == want.keys()


@pytest.mark.parametrize(("one", "other"), [
    ("bf16_mixed", "msamp_o2"), ("msamp_o2", "bf16_mixed"), ("fp16_mixed", "te_fp8"), ("te_fp8", "fp16_mixed"),
])  # fmt: skip
def test_another_level_goes_on_with_the_values(one, other, tmp_path):
    first_gradients(one, SaveAfter(tmp_path / "x.ckpt", 2))
    got, want = first_gradients(other, ckpt=tmp_path / "x.ckpt"), first_gradients(other)
    assert close(got, want, 0.15) and not close(got, {n: g / 3 for n, g in want.items()}, 0.5)


# Sums in another order; FP16 rounds once more. In FP8 each of four sums is rounded by chance, here and there.
BOUNDS = {"msamp_o2": 0.1, "msamp_o3": 0.1, "fp16_mixed": 2e-3}
SHARDED = {"in one file": {"save_distributed_checkpoint": False}, "in the background": {"async_checkpoints": True}}


def on_two(rank, place):
    def run(case, strategy, *callbacks, ckpt=None):
        batches = ResumableLoader(Samples(48), 2, 3, rank, 2)
        made = LowPrecisionShardedStrategy(**SHARDED[strategy]) if strategy in SHARDED else strategy
        how = {"devices": 2, "accumulate_grad_batches": 4, "use_distributed_sampler": False, "strategy": made}
        return first_gradients(case, *callbacks, ckpt=ckpt, batches=batches, **how)

    found = {}
    cases = ["bf16_mixed", "te_fp8", "fp16_mixed", "msamp_o2", "msamp_o3"]
    for strategy in ("ddp", "lowprec_ddp", "lowprec_sharded", *SHARDED):
        for case in cases if strategy != "in the background" else ["bf16_mixed"]:
            path, again = place / f"{case}-{strategy}.ckpt", place / f"{case}-{strategy}-again.ckpt"
            want = run(case, strategy, SaveAfter(path, 2))
            got, last = run(case, strategy, SaveAfter(again, 3), ckpt=path), run(case, strategy, ckpt=again)
            bound = BOUNDS.get(case, 1e-5)
            found[f"{case} {strategy}"] = close(got, want, bound) and close(last, want, bound)
    # Sharded gradients in whole ones' places, and the other way round.
    for one, other in (("in one file", "lowprec_ddp"), ("lowprec_ddp", "lowprec_sharded")):
        for case in ("bf16_mixed", "msamp_o2"):
            got = run(case, other, ckpt=place / f"{case}-{one}.ckpt")
            found[f"{case} {other} after {one}"] = close(got, run(case, other), BOUNDS.get(case, 1e-5))
    return found


class Sees(Net):
    """Keeps the gradients that its first step begins with."""

    def training_step(self, batch, batch_idx):
        if not hasattr(self, "seen"):
            self.seen = {n: in_full(p.grad).clone() for n, p in self.sharded.items()}
        return super().training_step(batch, batch_idx)

    def on_train_start(self):
        self.sharded = dict(self.named_parameters())


def on_one(rank, path):
    model = Sees()
    options = OPTIONS | {"max_steps": 1, "accumulate_grad_batches": 4, "strategy": "lowprec_sharded"}
    train(model, plugin("bf16_mixed"), data=ResumableLoader(Samples(48), 4, 3), ckpt=path, **options)
    return model.seen


def test_several_processes_lose_nothing(tmp_path):
    one, other = on_processes(2, tmp_path, on_two, tmp_path)
    assert len(one) == 25 and all(one.values()) and all(other.values()), (one, other)
    whole = torch.load(tmp_path / "bf16_mixed-in one file.ckpt", weights_only=True)["LowPrecision"]["partial_gradients"]
    seen = torch.load(tmp_path / "bf16_mixed-lowprec_ddp.ckpt", weights_only=True)["LowPrecision"]["partial_gradients"]
    assert close(whole["grads"], seen["grads"], 1e-5)
    path = tmp_path / "bf16_mixed-lowprec_sharded.ckpt"
    assert_same(on_processes(1, tmp_path, on_one, path)[0], whole["grads"])


class Stops(Callback):
    """Ends the training between two micro-batches."""

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        trainer.should_stop = batch_idx == 1


def on_two_again(rank):
    found = {}
    for case in ("bf16_mixed", "te_fp8", "msamp_o2"):
        grads = []
        for stops in (False, True):
            model, seen = Net(), Gradients()
            options = OPTIONS | {"gradient_clip_val": None, "devices": 2, "strategy": "lowprec_sharded", "max_steps": 1}
            if stops:
                train(model, plugin(case), Stops(), data=data(), **options)
            train(model, plugin(case), seen, data=data(), **options)
            grads.append(seen.grads)
        found[case] = close(grads[1], grads[0], 1e-6)
    return found


def test_a_step_that_was_not_made_leaves_nothing_to_the_next_training(tmp_path):
    for found in on_processes(2, tmp_path, on_two_again):
        assert found == dict.fromkeys(("bf16_mixed", "te_fp8", "msamp_o2"), True)

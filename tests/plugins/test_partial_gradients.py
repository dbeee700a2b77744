"""A checkpoint written between two micro-batches holds the gradients of those that have run."""

import warnings

import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint, OnExceptionCheckpoint
from support import CASES, FP16_HALF, Net, assert_same, level_of, loader, plugin, stateful_loader, train

from nemo_lowprec.formats import GradientTensor
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
                n: (p.grad.dequantize() if isinstance(p.grad, GradientTensor) else p.grad).float().clone()
                for n, p in module.named_parameters() if p.grad is not None
            }  # fmt: skip


def first_gradients(case, *callbacks, ckpt=None, micro=2, **options):
    seen = Gradients()
    options = OPTIONS | {"max_steps": 1, "gradient_clip_val": None} | options
    train(Net(), plugin(case), seen, *callbacks, data=data(micro), ckpt=ckpt, **options)
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


def on_two(rank, place):
    found = {}
    for case in ("bf16_mixed", "te_fp8", "fp16_mixed", "msamp_o2"):
        for strategy in ("ddp", "lowprec_ddp"):
            how = {"devices": 2, "strategy": strategy}
            path = place / f"{case}-{strategy}.ckpt"
            want = first_gradients(case, SaveAfter(path, 2), **how)
            got = first_gradients(case, ckpt=path, **how)
            # Sums of FP32 in another order; FP16 and FP8 round once more.
            bound = {"msamp_o2": 0.06, "fp16_mixed": 2e-3}.get(case, 1e-5)
            found[f"{case} {strategy}"] = close(got, want, bound)
    saves = [SaveAfter(place / f"lost{i}.ckpt", i) for i in (1, 2)]
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        first_gradients("msamp_o2", *saves, devices=2, strategy="lowprec_sharded")
        first_gradients("msamp_o2", ckpt=place / "lost2.ckpt", devices=2, strategy="lowprec_sharded")
    found["said"] = [str(w.message).partition(" between")[0].split()[-1] for w in seen if LOST in str(w.message)]
    return found


def test_several_processes_lose_nothing_or_say_so(tmp_path):
    one, other = on_processes(2, tmp_path, on_two, tmp_path)
    assert (one.pop("said"), other.pop("said")) == (["saved", "resumed"], [])  # once, by the first process
    assert len(one) == 8 and all(one.values()) and all(other.values()), (one, other)

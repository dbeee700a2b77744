"""What the MS-AMP levels can be told: stochastic rounding, gradient release, and FP16 as the half format."""

import pytest
import torch
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from support import FP16_HALF, MSAMP_LEVELS, Net, assert_same, loader, plugin, save_at, stateful_loader, train
from torch import nn

from nemo_lowprec.report import Audit
from nemo_lowprec.tensors import GradientTensor

STEPS, LR = 10, 2**-16


class Drifting(Net):
    """Weights of 1.5, where FP16's step is 2**-10, and a gradient of 1 for each of them at every step."""

    def __init__(self):
        super().__init__(optimizer=lambda p: torch.optim.AdamW([self.mid.weight, self.head.weight], lr=LR))
        nn.init.constant_(self.mid.weight, 1.5)
        nn.init.constant_(self.head.weight, 1.5)

    def loss(self, batch):
        ones = torch.ones(len(batch["x"]), 128)
        return self.mid(ones).float().sum() + self.head(ones).float().sum()

    def configure_optimizers(self):
        return torch.optim.AdamW([self.mid.weight, self.head.weight], lr=LR, weight_decay=0.0)


@pytest.mark.parametrize("case", MSAMP_LEVELS)
def test_updates_of_a_64th_of_a_step_between_numbers(case):
    """To nearest they are lost; rounded at random, the mean of the weights moves by what they add up to."""

    def means(**options):
        precision = plugin(case, **options)
        weights = train(Drifting(), precision, max_steps=STEPS, max_epochs=-1).state["weights"]
        return [float(weights[name].double().mean()) - 1.5 for name in ("mid.weight", "head.weight")]

    assert means() == [0.0, 0.0]
    # The mean of n elements after 10 chances of 1/64 is right within 4 * 2**-10 * sqrt(10 / 64 / n), 6 % here; FP8
    # moments are off by less than 3 %.
    for moved, count in zip(means(stochastic_rounding=True), (128 * 128, 128 * 32), strict=True):
        assert moved == pytest.approx(-STEPS * LR, rel=0.03 + 4 * 2**-10 * (STEPS / 64 / count) ** 0.5 / (STEPS * LR))


@pytest.mark.parametrize("case", MSAMP_LEVELS)
def test_a_seed_rounds_the_same_way_every_time(case):
    def state(**options):
        return train(Net(), plugin(case, **options), max_steps=1).state

    first = state(stochastic_rounding=True, rounding_seed=5)
    torch.rand(3)  # nothing is drawn from torch's generator
    assert_same(state(stochastic_rounding=True, rounding_seed=5), first)
    nearest, other = state(rounding_seed=5), state(stochastic_rounding=True, rounding_seed=6)
    for name, value in first["weights"].items():
        for weights in (nearest["weights"], other["weights"]):
            if value.dim() == 1:  # FP32
                assert torch.equal(value, weights[name]), name
                continue
            differing = float((value != weights[name]).float().mean())
            assert 0.1 < differing < 0.7, name
            # Of two neighbouring numbers, one or the other.
            torch.testing.assert_close(value.float(), weights[name].float(), rtol=2**-10, atol=2**-24)


@pytest.mark.parametrize("case", MSAMP_LEVELS)
def test_stochastic_rounding_resumes_bit_for_bit(case, tmp_path):
    def run(steps, *callbacks, ckpt=None):
        precision = plugin(case, stochastic_rounding=True, rounding_seed=3)
        return train(Net(0.2), precision, *callbacks, data=stateful_loader(), ckpt=ckpt, max_steps=steps).state

    whole = run(4)
    run(2, save_at(tmp_path, 2))
    assert_same(run(4, ckpt=tmp_path / "step=2.ckpt"), whole)


class Twin(Net):
    """A weight is used twice, one parameter never; looks at the gradients after backward."""

    def __init__(self, recompute=None):
        super().__init__(0.2, recompute, stepwise=True)
        self.twin = nn.Linear(128, 128, bias=False)
        self.twin.weight = self.mid.weight
        self.unused = nn.Linear(32, 32)
        self.left = []

    def middle(self, x):
        return self.twin(super().middle(x))

    def on_after_backward(self):
        self.left.append(sum(p.grad is not None for p in self.parameters()))


@pytest.mark.parametrize("recompute", [None, "reentrant", "non_reentrant"])
@pytest.mark.parametrize("case", MSAMP_LEVELS)
def test_gradient_release_changes_no_bit_and_leaves_no_gradient(case, recompute):
    plain, released = Twin(recompute), Twin(recompute)
    want = train(plain, case, max_steps=4).state
    got = train(released, plugin(case, gradient_release=True), max_steps=4).state
    assert plain.losses == released.losses
    assert_same(got, want)
    assert plain.left == [7] * 4 and released.left == [0] * 4


def test_gradient_release_with_stochastic_rounding_and_two_groups():
    groups = lambda p: torch.optim.Adam(  # noqa: E731
        [{"params": [q for q in p if q.dim() > 1], "weight_decay": 0.1}, {"params": [model.norm.weight], "lr": 0.05}],
        lr=1e-2,
    )
    states = []
    for release in (False, True):
        model = Net(optimizer=groups)
        precision = plugin("msamp_o2", gradient_release=release, stochastic_rounding=True)
        states.append(train(model, precision, max_steps=3).state)
    assert_same(*states)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"accumulate_grad_batches": 2}, "accumulate_grad_batches=2"),
        ({"gradient_clip_val": 1.0}, "gradient_clip_val=1.0"),
        ({"gradient_clip_val": 0.5, "gradient_clip_algorithm": "value"}, "gradient_clip_val=0.5"),
    ],
)
def test_gradient_release_is_refused_with_what_needs_all_gradients(options, message):
    model = Net()
    start = {name: p.detach().clone() for name, p in model.named_parameters()}
    with pytest.raises(ValueError, match=f"gradient_release=True .*cannot go with {message}. Leave one of them out"):
        train(model, plugin("msamp_o2", gradient_release=True), **options)
    assert not model.losses
    assert_same(dict(model.state_dict()), start)


@pytest.mark.parametrize("case", FP16_HALF)
def test_an_overflow_shows_in_the_gradients_and_skips_the_step(case):
    class Overflows(Net):
        def __init__(self):
            super().__init__(stepwise=True)
            self.nonfinite, self.rates = [], []
            self.head.weight.register_hook(self.spoil)

        def spoil(self, grad):  # a column of one matrix
            return grad.index_fill(1, torch.tensor([3]), float("inf")) if self.trainer.global_step == 1 else grad

        def on_after_backward(self):
            grad = self.head.weight.grad
            assert isinstance(grad, GradientTensor)
            self.nonfinite.append(not bool(grad.isfinite().all()))

        def on_train_batch_end(self, outputs, batch, batch_idx):
            self.rates.append(self.trainer.optimizers[0].param_groups[0]["lr"])
            assert all(v.isfinite().all() for v in self.state_dict().values())

    model = Overflows()
    run = train(model, plugin(case, loss_scale=None, initial_loss_scale=512.0, hysteresis=1), max_steps=3)
    assert model.nonfinite == [False, True, False]
    assert model.rates == pytest.approx([0.009, 0.009, 0.0081])  # the schedule waits for the step that was skipped
    assert {int(s["step"]) for s in run.state["optimizers"][0]["state"].values()} == {2}
    assert run.trainer.precision_plugin.engine.step.loss_scale.scale == 256.0


@pytest.mark.parametrize("case", FP16_HALF)
def test_fp16_half_reads_as_fp16_and_trains_as_bf16_does(case):
    class Looking(Net):
        def on_before_zero_grad(self, optimizer):
            self.read = {p.dtype for p in self.parameters() if p.dim() > 1}

    models = [Looking(), Looking()]
    for model, name in zip(models, (case, case.partition("+")[0]), strict=True):
        train(model, name, data=loader(16), max_steps=8, max_epochs=-1)
    assert [m.read for m in models] == [{torch.float16}, {torch.bfloat16}]
    assert models[0].losses == pytest.approx(models[1].losses, rel=0.05, abs=0.01)


@pytest.mark.parametrize("release", [False, True])
def test_accumulation_that_a_callback_schedules(release):
    """It changes accumulate_grad_batches after the Trainer was made."""
    schedule = GradientAccumulationScheduler({0: 2})
    model = Net()
    if not release:
        train(model, plugin("msamp_o2"), schedule, max_epochs=1)
        assert len(model.losses) == 4 and model.trainer.global_step == 2
        return
    with pytest.raises(ValueError, match=r"gradient_release=True .*cannot go with GradientAccumulationScheduler"):
        train(model, plugin("msamp_o2", gradient_release=True), schedule, max_epochs=1)


@pytest.mark.parametrize("case", MSAMP_LEVELS)
def test_gradient_release_refuses_a_second_gradient_before_the_step(case):
    class Twice(Net):
        def training_step(self, batch, batch_idx):
            self.loss(batch).backward()
            return super().training_step(batch, batch_idx)

    with pytest.raises(RuntimeError, match="gradient_release=True has stepped this parameter already"):
        train(Twice(), plugin(case, gradient_release=True), max_steps=1)


def test_gradient_release_refuses_clipping_by_hand():
    class Clips(Net):
        def configure_gradient_clipping(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None):
            self.clip_gradients(optimizer, 0.5, "norm")

    with pytest.raises(ValueError, match="gradient_release=True has stepped each parameter before"):
        train(Clips(), plugin("msamp_o2", gradient_release=True), max_steps=1)


def test_gradient_release_refuses_a_second_optimizer_s_gradients_in_the_first_one_s_pass():
    class Adversaries(Net):
        automatic_optimization = False

        def configure_optimizers(self):
            return [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (self.mid, self.head)]

        def training_step(self, batch, batch_idx):
            for optimizer in self.optimizers():  # each pass reaches both halves
                optimizer.zero_grad()
                self.manual_backward(super().training_step(batch, batch_idx))
                optimizer.step()

    with pytest.raises(RuntimeError, match="gradient_release=True has stepped this parameter already"):
        train(Adversaries(), plugin("msamp_o2", gradient_release=True), max_steps=2)


@pytest.mark.parametrize("case", [*MSAMP_LEVELS, "bf16_with_fp8_mixed+fp8_params"])
def test_a_step_that_was_broken_off_leaves_model_and_optimizer_together(case):
    class Breaks(Net):
        def __init__(self):
            super().__init__()
            self.own = torch.optim.AdamW(self.parameters(), lr=1e-2)
            self.breaks = True

        def configure_optimizers(self):
            return self.own

        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            if self.breaks:
                self.kept = loss
                raise KeyError("broken off")
            return loss

    model = Breaks()
    with pytest.raises(KeyError, match="broken off"):
        train(model, case, max_steps=1)
    held = {id(p) for group in model.own.param_groups for p in group["params"]}
    assert held == {id(p) for p in model.parameters()}
    model.breaks = False
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    train(model, case, max_steps=2)
    assert all(not torch.equal(p, before[name]) for name, p in model.named_parameters())


@pytest.mark.parametrize("case", [*MSAMP_LEVELS, "bf16_mixed", "bf16_with_fp8_mixed", "te_fp8"])
@pytest.mark.parametrize("parametrization", ["spectral_norm", "weight_norm"])
def test_parametrizations_train(case, parametrization):
    model = Net(0.2)
    getattr(nn.utils.parametrizations, parametrization)(model.mid)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    train(model, case, max_epochs=2)
    assert model.losses[-1] < model.losses[0]
    assert all(not torch.equal(p, before[name]) for name, p in model.named_parameters())


@pytest.mark.parametrize("case", ["msamp_o2", "msamp_o3", "msamp_o2+fp16"])
def test_both_moments_in_fp8(case, tmp_path):
    """The row says so, the audit finds it, the loss is that of FP16's, and a run goes on bit for bit."""
    model, other, audit = Net(), Net(), Audit()
    precision = plugin(case, states="fp8+fp8")
    assert precision.level.columns()["Optimizer states"] == "FP8+FP8" and "states='fp8+fp8'" in repr(precision)
    at_4 = save_at(tmp_path, 4)
    whole = train(model, precision, audit, at_4, data=stateful_loader(), max_steps=8, max_epochs=2).state
    train(other, plugin(case), data=stateful_loader(), max_steps=8, max_epochs=2)
    assert model.losses == pytest.approx(other.losses, rel=0.1, abs=0.05) and model.losses != other.losses
    assert audit.report.agrees
    sizes = [
        f.bytes_per_param for f in audit.report.findings if (f.column, f.part) == ("Optimizer states", "converted")
    ]
    assert 2 < sum(sizes) < 2.1
    again = train(
        Net(), plugin(case, states="fp8+fp8"), data=stateful_loader(), max_steps=8, max_epochs=2,
        ckpt=tmp_path / "step=4.ckpt",
    ).state  # fmt: skip
    for part in ("weights", "copies", "masters", "optimizers"):
        assert_same(again[part], whole[part], part)
    # FP16's second moments take the values of FP8's, and the other way round.
    train(Net(), plugin(case), data=stateful_loader(), max_steps=6, max_epochs=2, ckpt=tmp_path / "step=4.ckpt")


def test_states_that_a_level_does_not_have():
    with pytest.raises(ValueError, match=r"states='fp16\+fp8' must be 'fp8\+fp16' or 'fp8\+fp8'"):
        plugin("msamp_o2", states="fp16+fp8")
    with pytest.raises(TypeError, match=r"msamp_o1 takes no 'states'\. Levels that do: msamp_o2, msamp_o3"):
        plugin("msamp_o1", states="fp8+fp8")

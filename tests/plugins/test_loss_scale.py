"""FP16: the loss scale follows its rules, and manual optimization sees true gradients."""

import pytest
import torch
from support import (
    CASES,
    FP16_HALF,
    Net,
    Overflowing,
    assert_same,
    kept,
    level_of,
    linear_optimizer,
    plugin,
    replay,
    train,
    values_of,
)

FP16_CASES = [case for case in [*CASES, *FP16_HALF] if level_of(case).has_loss_scale]


@pytest.mark.parametrize(
    ("options", "scales"),
    [
        ({"hysteresis": 2}, [1024.0, 1024.0, 512.0, 256.0]),
        ({"hysteresis": 1, "min_loss_scale": 512.0}, [1024.0, 512.0, 512.0, 512.0]),
        ({"loss_scale": 128.0}, [128.0] * 4),
    ],
)
def test_scale_after_one_good_step_and_three_overflows(options, scales):
    model = Overflowing(1, 2, 3)
    train(model, plugin("fp16_mixed", **{"loss_scale": None, "initial_loss_scale": 1024.0} | options), max_steps=4)
    assert model.scales == scales


def test_scale_doubles_after_a_window_of_good_steps():
    model = Overflowing(2)
    options = {"loss_scale": None, "initial_loss_scale": 64.0, "loss_scale_window": 2, "hysteresis": 1}
    train(model, plugin("fp16_mixed", **options), max_steps=6, max_epochs=-1)
    assert model.scales == [64.0, 128.0, 64.0, 64.0, 128.0, 128.0]


@pytest.mark.parametrize("case", ["fp16_amp", "fp16_mixed", "bf16_mixed", "bf16_with_fp8_mixed"])
def test_a_training_step_that_returns_none_skips_the_batch(case):
    class Skips(Net):
        def training_step(self, batch, batch_idx):
            return None if batch_idx == 1 else super().training_step(batch, batch_idx)

    skips, plain = Skips(), Net()
    run = train(skips, case, max_epochs=1)
    batches = list(run.trainer.train_dataloader)
    assert len(skips.losses) == 3
    want = train(plain, case, data=replay(b for i, b in enumerate(batches) if i != 1), max_epochs=1)
    assert_same(run.state["weights"], want.state["weights"])


@pytest.mark.parametrize("case", CASES)
def test_manual_optimization_equals_automatic(case):
    class Manual(Net):
        automatic_optimization = False

        def training_step(self, batch, batch_idx):
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(super().training_step(batch, batch_idx))
            optimizer.step()

    manual = train(Manual(), case, max_steps=3)
    automatic = train(Net(), case, max_steps=3)
    for part in ("weights", "copies", "masters", "optimizers"):
        assert_same(manual.state[part], automatic.state[part], part)


class Gan(Net):
    """Two optimizers in turn, each over one half of the model."""

    automatic_optimization = False

    def __init__(self, case, bad=None):
        super().__init__()
        self.bad = bad
        self.make_second = linear_optimizer(case, 0.1)

    def configure_optimizers(self):
        first = torch.optim.AdamW([*self.inp.parameters(), *self.norm.parameters()], lr=1e-2)
        second = self.make_second([*self.mid.parameters(), *self.head.parameters()])
        return first, second

    def training_step(self, batch, batch_idx):
        for i, optimizer in enumerate(self.optimizers()):
            self.toggle_optimizer(optimizer)
            loss = super().training_step(batch, batch_idx)
            optimizer.zero_grad()
            self.manual_backward(loss * float("inf") if (batch_idx, i) == self.bad else loss)
            optimizer.step()
            self.untoggle_optimizer(optimizer)


@pytest.mark.parametrize("case", CASES)
def test_two_optimizers_in_manual_optimization(case):
    model = Gan(case)
    state = train(model, case, max_epochs=2).state
    start = dict(Net().named_parameters())
    for name, value in state["weights"].items():
        assert not torch.equal(value, kept(case, name, start[name])), name
    assert model.losses[-1] < model.losses[0]


@pytest.mark.parametrize("case", FP16_CASES)
def test_an_overflow_of_one_optimizer_does_not_hold_back_the_other(case):
    model = Gan(case, bad=(0, 1))
    state = train(model, case, max_steps=2).state  # one batch, two attempts
    start = dict(Net().named_parameters())
    weights = state["weights"].items()
    moved = {name.split(".")[0] for name, value in weights if not torch.equal(value, kept(case, name, start[name]))}
    assert moved == {"inp", "norm"}


class Both(Net):
    """Two optimizers that step on the gradients of one backward pass, which ``clip`` clips by hand."""

    automatic_optimization = False

    def __init__(self, clip=None, bad=None):
        super().__init__()
        self.clip, self.bad = clip, bad
        self.norms, self.scales, self.skipped = [], [], []

    def configure_optimizers(self):
        halves = [*self.inp.parameters(), *self.norm.parameters()], [*self.mid.parameters(), *self.head.parameters()]
        return [torch.optim.AdamW(half, lr=1e-2, eps=1e-3) for half in halves]

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        optimizers = self.optimizers()
        for optimizer in optimizers:
            optimizer.zero_grad()
        self.manual_backward(loss)
        if batch_idx == self.bad:
            self.inp.bias.grad.fill_(float("inf"))
        engine = self.trainer.precision_plugin.engine
        for optimizer in optimizers:
            if self.clip is not None:
                self.clip_gradients(optimizer, self.clip, "norm")
            optimizer.step()
            params = optimizer.param_groups[0]["params"]
            self.norms.append(torch.stack([stored_norm(p.grad) for p in params]).norm().item())
            self.skipped.append(optimizer.optimizer in engine.step.skipped)
        self.scales.append(engine.step.loss_scale.scale)


def stored_norm(grad):
    return values_of(grad).float().norm()


@pytest.mark.parametrize("case", FP16_CASES)
def test_optimizers_that_share_a_backward_pass_share_its_scale(case):
    runs = []
    for window in (1, 1000):  # with 1 the scale doubles at every step, for the next backward pass
        model = Both()
        train(model, plugin(case, loss_scale=None, initial_loss_scale=256.0, loss_scale_window=window), max_steps=6)
        runs.append(model)
    assert runs[0].scales == [512.0, 1024.0, 2048.0] and runs[1].scales == [256.0] * 3
    assert runs[0].norms == pytest.approx(runs[1].norms, rel=0.1)


@pytest.mark.parametrize("case", FP16_CASES)
def test_an_overflow_counts_once_and_holds_back_its_own_optimizer(case):
    model = Both(bad=1)
    train(model, plugin(case, loss_scale=None, initial_loss_scale=256.0, hysteresis=1), max_steps=6)
    assert model.skipped == [False, False, True, False, False, False] and model.scales == [256.0, 128.0, 128.0]
    assert 0.5 < model.norms[3] / model.norms[1] < 2


@pytest.mark.parametrize("case", FP16_CASES)
def test_manual_clipping_sees_true_gradients(case):
    model, loose = Both(clip=0.05), Both()
    train(model, plugin(case, loss_scale=None, initial_loss_scale=256.0), max_steps=2)
    train(loose, plugin(case, loss_scale=None, initial_loss_scale=256.0), max_steps=2)
    assert model.norms == pytest.approx([0.05, 0.05], rel=0.05) and min(loose.norms) > 0.06

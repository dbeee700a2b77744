"""A step whose gradients are not finite is skipped whole, at every level."""

import warnings

import pytest
import torch
from support import (
    CASES,
    FP16_HALF,
    Hidden,
    Overflowing,
    assert_same,
    assert_second_skipped,
    foreach_adamw,
    fused_adamw,
    level_of,
    plugin,
    replay,
    train,
)

from nemo_lowprec.grads import find_nonfinite, true_gradients
from nemo_lowprec.plugins import LEVELS

ALL = [*CASES, *FP16_HALF]
INF, NAN = float("inf"), float("nan")


def scaled(case, **options):
    """The case with dynamic loss scaling, where it has any."""
    dynamic = {"loss_scale": None, "initial_loss_scale": 1024.0, "hysteresis": 1}
    return plugin(case, **dynamic if level_of(case).has_loss_scale else {}, **options)


@pytest.mark.parametrize("case", ALL)
@pytest.mark.parametrize(
    ("factor", "optimizer", "clipping"),
    [
        (INF, foreach_adamw, None), (NAN, fused_adamw, None), (NAN, foreach_adamw, "norm"), (INF, fused_adamw, "norm"),
        (INF, fused_adamw, "value"),
    ],
)  # fmt: skip
def test_the_step_is_skipped_whole(case, factor, optimizer, clipping):
    model = Overflowing(1, factor=factor, optimizer=optimizer)
    options = {"gradient_clip_val": 0.5, "gradient_clip_algorithm": clipping} if clipping else {}
    run = train(model, scaled(case), max_steps=3, **options)
    assert run.trainer.global_step == 3  # Lightning counts attempts
    assert_second_skipped(model)
    assert model.scales == ([1024.0, 512.0, 512.0] if level_of(case).has_loss_scale else [])


@pytest.mark.parametrize("case", [c for c in ALL if level_of(c).scaling != "nvfp4"])  # which draws random numbers
def test_training_after_it_equals_training_without_it(case):
    """The skipped batch leaves no trace: the same batches without it give the same weights bit for bit."""
    skipped = train(Overflowing(0), case, max_steps=3, max_epochs=-1)
    batches = list(skipped.trainer.train_dataloader)[1:3]
    plain = train(Overflowing(), case, data=replay(batches), max_steps=2, max_epochs=-1)
    for part in ("weights", "masters", "optimizers"):
        assert_same(skipped.state[part], plain.state[part], part)
    if "fp8" in plain.state["plugin"]:
        assert_same(skipped.state["plugin"]["fp8"], plain.state["plugin"]["fp8"])


@pytest.mark.parametrize("case", LEVELS)
def test_schedulers_by_epoch_are_not_held_back(case):
    class ByEpoch(Overflowing):
        def configure_optimizers(self):
            optimizer = torch.optim.AdamW(self.parameters(), lr=0.1)
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]

    model = ByEpoch(3)  # the last step of the first epoch
    train(model, plugin(case), max_epochs=1)
    assert model.trainer.optimizers[0].param_groups[0]["lr"] == 0.05


@pytest.mark.parametrize("case", LEVELS)
def test_a_schedulers_own_hook_in_the_module_still_runs(case):
    class Own(Overflowing):
        calls = 0

        def lr_scheduler_step(self, scheduler, metric):
            self.calls += 1
            scheduler.step()

    model = Own(1)
    train(model, plugin(case), max_steps=3)
    assert model.calls == 2 and model.after[-1]["schedule"] == 2
    assert "lr_scheduler_step" not in model.__dict__  # nothing of the plugin's stays on the module


@pytest.mark.parametrize("case", ["fp16_with_fp8_mixed", "bf16_with_fp8_mixed", "msamp_o2"])
def test_an_infinity_that_an_fp8_cast_hides_from_the_gradients_skips_the_step(case):
    module = Hidden()
    train(module, case, max_steps=5)
    assert module.skipped_at == [2]


@pytest.mark.parametrize("case", ["bf16_mixed", "msamp_o2"])
def test_a_level_that_does_not_scale_the_loss_says_once_that_it_skips(case):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        train(Overflowing(1, 2, factor=NAN), case, max_steps=4)
    assert sum("A gradient is not finite" in str(w.message) for w in caught) == 1


def test_dynamic_loss_scaling_overflows_in_silence():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        train(Overflowing(1), scaled("fp16_mixed"), max_steps=3)
    assert not any("not finite" in str(w.message) for w in caught)


@pytest.mark.parametrize("case", ["bf16_mixed", "msamp_o2"])
@pytest.mark.parametrize(("clipping", "looks"), [({}, 3), ({"gradient_clip_val": 1.0}, 0)])
def test_a_norm_that_clipping_has_taken_is_not_taken_again(case, clipping, looks, monkeypatch):
    looked = []
    monkeypatch.setattr(true_gradients, "find_nonfinite", lambda *args: looked.append(1) or find_nonfinite(*args))
    train(Overflowing(), case, max_steps=3, **clipping)
    assert len(looked) == looks


@pytest.mark.parametrize("case", ["bf16_mixed", "te_fp8", "msamp_o2"])
def test_a_backward_pass_that_nobody_announces_is_looked_at(case):
    class Own(Overflowing):
        automatic_optimization = False

        def training_step(self, batch, batch_idx):
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.loss(batch).backward()  # not self.manual_backward
            optimizer.step()

    model = Own(1)
    train(model, case, max_steps=3)
    assert_same(model.after[1]["weights"], model.before[1]["weights"])
    assert not torch.equal(model.after[2]["weights"]["mid.weight"], model.before[2]["weights"]["mid.weight"])


def test_momentum_starts_at_zero_where_the_first_step_is_skipped():
    """torch's fused SGD leaves it uninitialized when it skips by itself."""

    def sgd(params):
        return torch.optim.SGD(params, lr=0.1, momentum=0.9, fused=True)

    skipped = train(Overflowing(0, optimizer=sgd), "bf16_mixed", max_steps=3)
    batches = list(skipped.trainer.train_dataloader)[1:3]
    plain = train(Overflowing(optimizer=sgd), "bf16_mixed", data=replay(batches), max_steps=2)
    assert_same(skipped.state["weights"], plain.state["weights"])
    assert_same(skipped.state["optimizers"], plain.state["optimizers"])


def test_gradient_release_has_stepped_already():
    model = Overflowing(1, factor=NAN)
    train(model, plugin("msamp_o2", gradient_release=True), max_steps=3)
    assert model.after[2]["weights"]["mid.weight"].isnan().any()
    assert [part["schedule"] for part in model.after] == [1, 2, 3]

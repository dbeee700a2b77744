"""What holds at every level: accumulation, clipping, checkpointing, evaluation, and gradients that read as true."""

import functools

import pytest
import torch
import torch.nn.functional as F
from support import CASES, Net, Samples, assert_same, is_low_bit, level_of, linear_optimizer, loader, plugin, train

from nemo_lowprec.tensors import GradientTensor

# Relative error of a gradient against the FP32 model's. The formats have 11, 8, 4 and 2 significant bits.
GRADIENT_BOUND = {"fp16": 0.01, "bf16": 0.03, "fp8": 0.2, "mxfp8": 0.2, "nvfp4": 0.7}

STEPS = {"max_steps": 3, "max_epochs": -1}


@functools.cache
def plain_run(case: str, dropout: float = 0.2):
    """Three steps of AdamW, for comparison with runs that must not differ."""
    return train(Net(dropout), case, **STEPS)


def flat(tensors):
    return torch.cat([t.float().reshape(-1) for t in tensors.values()])


def relative_error(got, want):
    return float((flat(got) - flat(want)).norm() / flat(want).norm())


def fp32_gradients():
    model = Net()
    samples = Samples()
    F.cross_entropy(model(samples.x[:4]), samples.y[:4]).backward()
    return {n: p.grad for n, p in model.named_parameters()}


@pytest.mark.parametrize("case", CASES)
def test_gradient_reads_as_true_gradient_before_the_step(case):
    got = plain_run(case, dropout=0.0).grads[0]
    want = fp32_gradients()
    assert got.keys() == want.keys()
    assert {g.dtype for g in got.values()} == {torch.float32}
    assert relative_error(got, want) < GRADIENT_BOUND[level_of(case).compute]


class Stored(Net):
    """Looks at the gradients right after backward."""

    def on_after_backward(self):
        self.dtypes = {p.grad.dtype for p in self.parameters()}
        self.in_fp8 = {n for n, p in self.named_parameters() if isinstance(p.grad, GradientTensor)}
        self.largest = float(self.head.weight.grad.abs().max())


@pytest.mark.parametrize("case", CASES)
def test_gradient_is_stored_as_the_chart_says(case):
    model = Stored()
    options = {"loss_scale": 1024.0} if level_of(case).has_loss_scale else {}
    observer = train(model, plugin(case, **options), max_steps=1)
    assert model.dtypes == {torch.float16 if level_of(case).weight_grad == "fp16" else torch.float32}
    matrices = {"inp.weight", "mid.weight", "head.weight"}
    assert model.in_fp8 == (matrices if level_of(case).weight_grad == "fp8" else set())
    scale = options.get("loss_scale", 1.0)  # between backward and step, FP16 gradients carry the loss scale
    assert model.largest == pytest.approx(scale * float(observer.grads[0]["head.weight"].abs().max()), rel=1e-3)


@pytest.mark.parametrize("case", CASES)
def test_accumulating_two_batches_equals_one_of_twice_the_size(case):
    linear = linear_optimizer(case, 0.1)
    start = dict(Net().named_parameters())
    runs = [
        train(Net(optimizer=linear), case, data=loader(4), max_steps=2, max_epochs=-1, accumulate_grad_batches=2),
        train(Net(optimizer=linear), case, data=loader(8), max_steps=2, max_epochs=-1),
    ]
    updates = [{n: r.state["weights"][n] - p.detach() for n, p in start.items()} for r in runs]
    assert flat(updates[1]).norm() > 0.01
    assert relative_error(*updates) < GRADIENT_BOUND[level_of(case).compute]


class Clipped(Net):
    """Clips by norm at even steps and by value at odd ones, and keeps gradients before and after."""

    def configure_gradient_clipping(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None):
        algorithm, bound = ("norm", 0.1) if self.global_step % 2 == 0 else ("value", 0.001)
        before = flat({n: p.grad for n, p in self.named_parameters()})
        self.clip_gradients(optimizer, bound, algorithm)
        self.pairs = [*getattr(self, "pairs", []), (before, flat({n: p.grad for n, p in self.named_parameters()}))]


@pytest.mark.parametrize("case", CASES)
def test_clipping_by_norm_and_by_value_acts_on_true_gradients(case):
    model = Clipped()
    train(model, case, max_steps=2)
    by_norm, by_value = model.pairs
    assert by_norm[0].norm() > 0.3  # of the order of the FP32 gradient's, so not scaled by the loss scale
    assert by_norm[0].norm() < 10
    torch.testing.assert_close(by_norm[1], by_norm[0] * (0.1 / by_norm[0].norm()))
    assert by_value[0].abs().max() > 0.001
    # Values that were clipped one by one are rounded anew where gradients are stored in E4M3: by a 16th at most.
    rounding = {"rtol": 2**-4, "atol": 1e-8} if is_low_bit(case) else {}
    torch.testing.assert_close(by_value[1], by_value[0].clamp(-0.001, 0.001), **rounding)


@pytest.mark.parametrize(("algorithm", "bound"), [("norm", 0.1), ("value", 0.001)])
@pytest.mark.parametrize("case", ["bf16_mixed", "fp16_mixed"])
def test_clipping_by_the_trainers_argument_reaches_the_masters(case, algorithm, bound):
    sgd = lambda params: torch.optim.SGD(params, lr=1.0)  # noqa: E731
    start = flat(dict(Net().named_parameters())).detach()
    options = {"gradient_clip_val": bound, "gradient_clip_algorithm": algorithm}
    state = train(Net(optimizer=sgd), case, max_steps=1, **options).state
    update = flat(state["masters"]) - start
    size = update.norm() if algorithm == "norm" else update.abs().max()
    assert float(size) == pytest.approx(bound, rel=1e-3)


@pytest.mark.parametrize("recompute", ["reentrant", "non_reentrant"])
@pytest.mark.parametrize("case", CASES)
def test_activation_checkpointing_changes_nothing(case, recompute):
    plain = plain_run(case)
    run = train(Net(0.2, recompute), case, **STEPS)
    assert_equal_training(run, plain)


@pytest.mark.parametrize("case", CASES)
def test_evaluation_in_the_middle_changes_nothing(case):
    plain = plain_run(case)
    observed = train(Net(0.2), case, data=(loader(), loader(8)), val_check_interval=1, **STEPS)
    assert "val/loss" in observed.trainer.callback_metrics
    assert_equal_training(observed, plain)


def assert_equal_training(run, plain):
    assert run.trainer.lightning_module.losses == plain.trainer.lightning_module.losses
    for part in ("weights", "copies", "masters", "optimizers"):
        assert_same(run.state[part], plain.state[part], part)
    assert_same(
        {k: v for k, v in run.state["plugin"].items() if k != "rng"},
        {k: v for k, v in plain.state["plugin"].items() if k != "rng"},
        "plugin",
    )


@pytest.mark.parametrize("case", CASES)
def test_training_lowers_the_loss(case):
    model = Net()
    train(model, case, data=loader(16), max_steps=8, max_epochs=-1)
    assert model.losses[-1] < 0.5 * model.losses[0]

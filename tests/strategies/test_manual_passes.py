"""Manual optimization without ``self.manual_backward``: gradients are what the level declares, or the step raises."""

import pytest
import torch

from nemo_lowprec.data.loader import ResumableLoader
from nemo_lowprec.tensors.dtensor import local_shard
from tests.processes import on_processes
from tests.support import (
    CASES,
    FP16_HALF,
    FP16_LEVELS,
    Net,
    Samples,
    assert_same,
    kept,
    level_of,
    plugin,
    trainer,
    values_of,
)

ALL = [*CASES, *FP16_HALF]
SOME = ["fp16_amp", "te_fp8", "msamp_o2", "msamp_o3", "fp16_mixed", "bf16_mixed"]
STRATEGIES = ["ddp", "lowprec_ddp", "lowprec_sharded"]
IN_PLACE = "In training_step, call self.manual_backward(loss) in its place."


class Manual(Net):
    """Steps by hand; ``way`` says where gradients come from."""

    automatic_optimization = False

    def __init__(self, way):
        super().__init__()
        self.way, self.steps = way, 0

    def training_step(self, batch, index):
        optimizer = self.optimizers(use_pl_optimizer=self.way != "torch's optimizer")
        optimizer.zero_grad()
        getattr(self, f"_{self.way}".replace("torch's optimizer", "manual").replace(" ", "_"))(batch)
        optimizer.step()
        self.steps += 1

    def _manual(self, batch):
        self.manual_backward(self.loss(batch))

    def _direct(self, batch):
        self.loss(batch).backward()

    def _both(self, batch):
        """A part of the gradient from each."""
        self.manual_backward(self.loss(batch))
        (self(batch["x"]).float().square().mean()).backward()

    def _in_a_closure(self, batch):
        self.optimizers().step(closure=lambda: self.loss(batch).backward())

    def _by_hand(self, batch):
        for param, grad in zip(
            self.parameters(), torch.autograd.grad(self.loss(batch), self.parameters()), strict=True
        ):
            param.grad = grad.to(param.grad_dtype or param.dtype)

    def _adversarial(self, batch):
        """Gradients of the input are all that is taken from a first pass."""
        x = batch["x"].requires_grad_()
        self.loss(batch).backward()
        moved = {"x": (x + 0.1 * x.grad.sign()).detach(), "y": batch["y"]}
        self.zero_grad()
        self.manual_backward(self.loss(moved))


def run(case, way, rank=0, **options):
    """(what a short training raised, the weights after it, its steps)."""
    model = Manual(way)
    fit = trainer(plugin(case), max_steps=2, max_epochs=-1, use_distributed_sampler=False, **options)
    before = {n: kept(case, n, p.detach().clone()).float() for n, p in model.named_parameters()}
    try:
        fit.fit(model, ResumableLoader(Samples(32), 4, 3, rank, options.get("devices", 1)))
    except RuntimeError as error:
        if rank == 0 and "devices" not in options:
            assert_same({n: p.detach() for n, p in model.named_parameters()}, before)
        return str(error), {}, model.steps
    return "", {n: values_of(local_shard(p)).clone() for n, p in model.named_parameters()}, model.steps


@pytest.mark.parametrize("case", ALL)
def test_one_process(case):
    error, weights, steps = run(case, "direct")
    if level_of(case).has_loss_scale:
        assert steps == 0
        lacks = f"it is not scaled as {level_of(case).name} asks"
        assert error == f"The gradient of inp.weight comes from loss.backward(): {lacks}. {IN_PLACE}"
    else:
        assert_same(weights, run(case, "manual")[1])


@pytest.mark.parametrize("case", FP16_LEVELS)
@pytest.mark.parametrize(("way", "text"), [
    ("both", IN_PLACE), ("in a closure", IN_PLACE),
    ("by hand", "was written by hand: it is not scaled"),
    ("torch's optimizer", "Step with the optimizer that self.optimizers() returns."),
])  # fmt: skip
def test_gradients_that_are_not_scaled_are_not_stepped_with(case, way, text):
    error, _, steps = run(case, way)
    assert text in error and steps == 0


@pytest.mark.parametrize("case", SOME)
def test_passes_whose_gradients_are_thrown_away(case):
    error, weights, steps = run(case, "adversarial")
    assert (error, steps) == ("", 2) and all(w.isfinite().all() for w in weights.values())


def every_case(rank):
    ways = {case: ["manual", "direct"] for case in SOME} | {"bf16_mixed": ["manual", "direct", "both", "adversarial"]}
    return {
        (strategy, case, way): run(case, way, rank, devices=2, strategy=strategy)
        for strategy in STRATEGIES for case in SOME for way in ways[case]
    }  # fmt: skip


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """What every case came to on each of two processes, all run by one pair of them."""
    return on_processes(2, tmp_path_factory.mktemp("ranks"), every_case)


@pytest.mark.parametrize("case", SOME)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_two_processes(ranks, strategy, case):
    level = level_of(case)
    lacks = [f"is not scaled as {case} asks"] * level.has_loss_scale
    if strategy != "lowprec_sharded" or level.is_low_bit:  # FSDP2 averages in every pass
        lacks.append("is not averaged over the processes")
    for rank in ranks:
        error, weights, steps = rank[strategy, case, "direct"]
        if lacks:
            assert steps == 0 and error.endswith(f" comes from loss.backward(): it {' and '.join(lacks)}. {IN_PLACE}")
            assert error.startswith("The gradient of inp.weight")
        else:
            assert_same(weights, rank[strategy, case, "manual"][1])


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_two_processes_and_several_passes(ranks, strategy):
    for rank in ranks:
        assert (IN_PLACE in rank[strategy, "bf16_mixed", "both"][0]) == (strategy != "lowprec_sharded")
        assert rank[strategy, "bf16_mixed", "adversarial"][0] == ""
    first, second = (rank[strategy, "bf16_mixed", "adversarial"][1] for rank in ranks)
    if strategy != "lowprec_sharded":
        assert_same(first, second)

"""A gradient that is not finite on one process after gradients were averaged: every process skips the step."""

import pytest
import torch
from lightning.pytorch.callbacks import Callback

from nemo_lowprec.data.loader import ResumableLoader
from nemo_lowprec.tensors import QuantizedTensor
from nemo_lowprec.tensors.dtensor import local_shard
from tests.processes import on_processes
from tests.support import CASES, FP16_HALF, Net, Samples, assert_same, clone, level_of, plugin, trainer

ALL = [*CASES, *FP16_HALF]
SOME = ["fp16_amp", "te_fp8", "msamp_o3", "fp16_mixed", "bf16_mixed", "fp16_with_fp8_mixed"]  # each way to decide
STRATEGIES = ["ddp", "lowprec_ddp", "lowprec_sharded"]
BAD = 1  # the step whose gradients are spoiled on the second process
OPTIONS = {
    "by norm": {"gradient_clip_val": 0.5},
    "by value": {"gradient_clip_val": 0.5, "gradient_clip_algorithm": "value"},
}


def spoil(param):
    """Make a gradient not finite on this process."""
    grad = local_shard(param.grad)
    grad.mul_(torch.nan) if isinstance(grad, QuantizedTensor) else grad.view(-1)[:1].fill_(torch.inf)


class Spoiler(Callback):
    """Spoils the gradient of one parameter where gradients are averaged already."""

    def __init__(self, name):
        self.name, self.backwards = name, 0

    def on_after_backward(self, trainer, module):
        self.backwards += 1
        if module.global_rank == 1 and self.backwards == BAD + 1:
            spoil(module.get_parameter(self.name))


class ByHook(Spoiler):
    """In the last hook that sees gradients before the step."""

    on_after_backward = Callback.on_after_backward

    def on_before_optimizer_step(self, trainer, module, optimizer):
        super().on_after_backward(trainer, module)


class Watched(Net):
    def __init__(self, **options):
        super().__init__(stepwise=True, **options)
        self.seen = []

    def on_train_batch_end(self, outputs, batch, index):
        self.seen.append({n: values(p) for n, p in self.named_parameters()})


class TwoOptimizers(Watched):
    """Manual optimization, clipped by norm; the spoiled gradient is the second optimizer's."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def configure_optimizers(self):
        halves = [[*self.inp.parameters(), *self.norm.parameters()], [*self.mid.parameters(), *self.head.parameters()]]
        return [torch.optim.AdamW(half, lr=1e-2) for half in halves]

    def training_step(self, batch, index):
        self.manual_backward(self.loss(batch))
        for optimizer in self.optimizers():
            self.clip_gradients(optimizer, 0.5, "norm")
        for optimizer in self.optimizers():
            optimizer.step()
            optimizer.zero_grad()


def values(param):
    """Of a parameter, or of this process's rows of it."""
    local = local_shard(param).detach()
    return (local.dequantize() if isinstance(local, QuantizedTensor) else local).clone()


def run(rank, case, strategy, model=None, spoiler=None, **options):
    dynamic = {"loss_scale": None, "initial_loss_scale": 256.0, "hysteresis": 1}
    precision = plugin(case, **dynamic if level_of(case).has_loss_scale else {})
    model = model or Watched()
    fit = trainer(
        precision, spoiler or Spoiler("mid.weight"), devices=2, strategy=strategy, max_epochs=-1,
        use_distributed_sampler=False, max_steps=3 * (2 if isinstance(model, TwoOptimizers) else 1), **options,
    )  # fmt: skip
    fit.fit(model, ResumableLoader(Samples(32), 4, 3, rank, 2, stop_at_epoch_end=False))
    engine = precision.engine
    counts = [sorted({float(s["step"]) for s in o.state.values()}) for o in fit.optimizers]
    return {
        "seen": model.seen,
        "steps": counts,
        "scale": engine.step.loss_scale and engine.step.loss_scale.scale,
        "fp8": clone(engine.state_dict().get("fp8", {})),
    }


def every_case(rank):
    found = {}
    for strategy in STRATEGIES:
        for case in ALL:
            found[f"{case} {strategy} plain"] = run(rank, case, strategy)
        for case in SOME:
            for name, options in OPTIONS.items():
                found[f"{case} {strategy} {name}"] = run(rank, case, strategy, **options)
            found[f"{case} {strategy} vector"] = run(rank, case, strategy, spoiler=Spoiler("head.bias"))
            found[f"{case} {strategy} manual"] = run(rank, case, strategy, TwoOptimizers())
            found[f"{case} {strategy} late"] = run(rank, case, strategy, spoiler=ByHook("mid.weight"))
    return found


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """What every case returned on each of two processes, all run by one pair of them."""
    return on_processes(2, tmp_path_factory.mktemp("ranks"), every_case)


WAYS = [
    *((case, "plain") for case in ALL),
    *((case, name) for case in SOME for name in (*OPTIONS, "vector", "manual", "late")),
]


@pytest.mark.parametrize(("case", "name"), WAYS)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_process_skips_the_step(ranks, case, strategy, name):
    key = f"{case} {strategy} {name}"
    scaled = level_of(case).has_loss_scale
    for rank in ranks:
        found = rank[key]
        assert found["steps"] == ([[3.0], [2.0]] if name == "manual" else [[2.0]])
        assert found["scale"] == (128.0 if scaled else None)
        before, after, last = found["seen"]
        second = [n for n in before if n.startswith(("mid", "head"))] if name == "manual" else list(before)
        assert_same({n: before[n] for n in second}, {n: after[n] for n in second})
        assert all(not torch.equal(after[n], last[n]) for n in ("inp.weight", "mid.weight"))
        assert all(v.isfinite().all() for v in last.values())
    first, other = (rank[key] for rank in ranks)
    if strategy != "lowprec_sharded":
        assert_same(first["seen"], other["seen"])
    assert_same(first["fp8"], other["fp8"])

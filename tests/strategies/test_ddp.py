"""Every level on two processes: torch's DDP as Lightning wraps it, and ``lowprec_ddp``, against one process."""

import pytest
import torch
from torch.utils.data import DataLoader, Subset

from tests.processes import on_processes
from tests.support import (
    CASES,
    FP16_HALF,
    Net,
    Samples,
    assert_same,
    is_low_bit,
    level_of,
    linear_optimizer,
    plugin,
    save_at,
    snapshot,
    train,
    values_of,
)

STRATEGIES = ["ddp", "lowprec_ddp"]
AT_CASES = pytest.mark.parametrize("case", [*CASES, *FP16_HALF])
BY_STRATEGY = pytest.mark.parametrize("strategy", STRATEGIES)
STEPS = 4


def batches(rank=None):
    """Batches of eight samples, or the half of each that a process gets."""
    data, size = Samples(8 * STEPS), 8
    if rank is not None:
        data, size = Subset(data, [i for i in range(len(data)) if i // 4 % 2 == rank]), 4
    return DataLoader(data, size, generator=torch.Generator())


def result(observer, model):
    state = observer.state
    return {
        "grads": [{n: values_of(g) for n, g in step.items()} for step in observer.grads],
        "weights": state["weights"],
        "state": {k: state[k] for k in ("copies", "masters", "optimizers")},
        "losses": model.losses,
        "histories": state["plugin"].get("fp8", {}),
        "scale": state["plugin"].get("loss_scale", {}),
    }


def run(case, rank=None, strategy="auto", ckpt=None, callbacks=(), **options):
    model = Net(optimizer=linear_optimizer(case, 0.1))
    processes = {} if rank is None else {"devices": 2, "strategy": strategy, "use_distributed_sampler": False}
    precision = plugin(case)
    observer = train(model, precision, *callbacks, data=batches(rank), ckpt=ckpt, **processes, **options)
    return result(observer, model)


# What runs on each process.

OPTIONS = {
    "plain": {},
    "clipped": {"gradient_clip_val": 0.05},
    "accumulated": {"accumulate_grad_batches": 2},
}


def every_case(rank, folder):
    found = {}
    for case in [*CASES, *FP16_HALF]:
        for strategy in STRATEGIES:
            runs = {name: run(case, rank, strategy, **options) for name, options in OPTIONS.items()}
            place = folder / f"{case}-{strategy}"
            run(case, rank, strategy, callbacks=[save_at(place, 2)], max_steps=2)
            runs["resumed"] = run(case, rank, strategy, ckpt=place / "step=2.ckpt")
            found[f"{case} {strategy}"] = runs
    return found


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """What every case returned on each of two processes, all run by one pair of them."""
    folder = tmp_path_factory.mktemp("ranks")
    return on_processes(2, folder, every_case, folder)


@pytest.fixture(scope="module")
def alone():
    """The same on one process with batches of both."""
    return {
        case: {name: run(case, **options) for name, options in OPTIONS.items()} for case in [*CASES, *FP16_HALF]
    }


# What is asserted of it.


@AT_CASES
@BY_STRATEGY
@pytest.mark.parametrize("name", OPTIONS)
def test_processes_end_the_same(ranks, case, strategy, name):
    first, second = (rank[f"{case} {strategy}"][name] for rank in ranks)
    for key in ("grads", "weights", "state", "histories", "scale"):
        assert_same(first[key], second[key], key)
    assert first["losses"] != second["losses"]

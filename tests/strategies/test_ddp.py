"""Every level on two processes: torch's DDP as Lightning wraps it, and ``lowprec_ddp``, against one process."""

import pytest
import torch

from nemo_lowprec.data.loader import ResumableLoader
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
    train,
    values_of,
)

STRATEGIES = ["ddp", "lowprec_ddp"]
ALL = [*CASES, *FP16_HALF]
AT_CASES = pytest.mark.parametrize("case", ALL)
BY_STRATEGY = pytest.mark.parametrize("strategy", STRATEGIES)
MICRO_BATCHES = 8


def batches(rank, accumulate):
    """Micro-batches of four: a process's own, or those of both in turn."""
    world = 1 if rank is None else 2
    size = 8 * accumulate
    return ResumableLoader(Samples(4 * MICRO_BATCHES), 4, 3, rank or 0, world, global_batch_size=size)


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


def run(case, rank=None, strategy="auto", ckpt=None, callbacks=(), accumulate=1, dropout=0.0, **options):
    model = Net(dropout, optimizer=linear_optimizer(case, 0.1))
    if rank is not None:
        options |= {"devices": 2, "strategy": strategy, "use_distributed_sampler": False}
    # One process takes the micro-batches of both, one after the other.
    options["accumulate_grad_batches"] = accumulate if rank is not None else 2 * accumulate
    data = batches(rank, accumulate)
    return result(train(model, plugin(case), *callbacks, data=data, ckpt=ckpt, **options), model)


# What runs on each process.

OPTIONS = {
    "plain": {},
    "clipped": {"gradient_clip_val": 0.05},
    "accumulated": {"accumulate": 2},
}


def every_case(rank, folder):
    found = {}
    for case in ALL:
        for strategy in STRATEGIES:
            runs = {name: run(case, rank, strategy, **options) for name, options in OPTIONS.items()}
            place = folder / f"{case}-{strategy}"
            runs["whole"] = run(case, rank, strategy, dropout=0.2)
            run(case, rank, strategy, callbacks=[save_at(place, 2)], max_steps=2, dropout=0.2)
            runs["resumed"] = run(case, rank, strategy, ckpt=place / "step=2.ckpt", dropout=0.2)
            found[f"{case} {strategy}"] = runs
    return found


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """What every case returned on each of two processes, all run by one pair of them."""
    folder = tmp_path_factory.mktemp("ranks")
    return on_processes(2, folder, every_case, folder)


@pytest.fixture(scope="module")
def alone():
    """The same on one process, which accumulates the micro-batches of both."""
    return {case: {name: run(case, **options) for name, options in OPTIONS.items()} for case in ALL}


# What is asserted of it.

RANDOM = {"bf16_with_nvfp4_mixed"}  # rounds gradients stochastically, on each process differently


@AT_CASES
@BY_STRATEGY
@pytest.mark.parametrize("name", OPTIONS)
def test_processes_end_the_same(ranks, case, strategy, name):
    first, second = (rank[f"{case} {strategy}"][name] for rank in ranks)
    for key in ("grads", "weights", "state", "histories", "scale"):
        assert_same(first[key], second[key], key)
    assert first["losses"] != second["losses"]


EXACT = pytest.mark.parametrize("case", [case for case in ALL if not is_low_bit(case) and case not in RANDOM])


@EXACT
@BY_STRATEGY
def test_training_is_exactly_that_of_one_process(ranks, alone, case, strategy):
    """The mean of two gradients is the sum of their halves, in FP32 and in FP16."""
    got, want = ranks[0][f"{case} {strategy}"]["plain"], alone[case]["plain"]
    for key in ("grads", "weights", "state", "scale"):
        assert_same(got[key], want[key], key)


@EXACT
@BY_STRATEGY
@pytest.mark.parametrize("name", ["clipped", "accumulated"])
def test_norms_and_sums_in_another_order_round_otherwise(ranks, alone, case, strategy, name):
    got, want = ranks[0][f"{case} {strategy}"][name], alone[case][name]
    bound = 2**-10 if level_of(case).comm == "fp16" else 2**-22
    for key, value in want["grads"][0].items():
        assert (got["grads"][0][key] - value).norm() <= bound * value.norm(), key
    for key, value in want["weights"].items():  # after steps in which FP8 may have rounded otherwise, too
        assert (got["weights"][key] - value).norm() <= 0.02 * value.norm(), key


@pytest.mark.parametrize("case", [case for case in ALL if is_low_bit(case) or case in RANDOM])
@BY_STRATEGY
@pytest.mark.parametrize("name", OPTIONS)
def test_gradients_are_those_of_one_process_within_their_rounding(ranks, alone, case, strategy, name):
    """FP8: two roundings to nearest on the way, where one process rounds the sum once, stochastically."""
    got, want = (runs["grads"][0] for runs in (ranks[0][f"{case} {strategy}"][name], alone[case][name]))
    bound = 0.25 if case in RANDOM else 0.1
    assert got.keys() == want.keys()
    for key, value in want.items():
        if value.dim() < 2 and is_low_bit(case):
            assert torch.equal(got[key], value) or name == "clipped", key
        assert (got[key] - value).norm() <= bound * value.norm(), key


@AT_CASES
@BY_STRATEGY
def test_a_resumed_run_goes_on_bit_for_bit(ranks, case, strategy):
    for rank in ranks:
        runs = rank[f"{case} {strategy}"]
        for key in ("weights", "state", "histories", "scale"):
            assert_same(runs["resumed"][key], runs["whole"][key], key)
        assert runs["resumed"]["losses"] == runs["whole"]["losses"][2:]

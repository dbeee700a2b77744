"""Experts on two GPUs: spread over the processes or on all of them, and from checkpoints of the other."""

import pytest

from tests.megatron_cases import FEW, TWO_GPUS, assert_close, assert_norms_close, assert_resumed, bound, results

pytestmark = TWO_GPUS
EXPERTS = {
    "num_moe_experts": 4, "moe_router_topk": 2, "moe_token_dispatcher_type": "alltoall", "moe_aux_loss_coeff": 0.01,
}  # fmt: skip


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    folder = tmp_path_factory.mktemp("experts")
    jobs = {}
    for case in FEW:
        whole = {"case": case, "sizes": {}, "world": 2, "data_parallel": 2, "transformer": EXPERTS}
        spread = {**whole, "sizes": {"expert_model_parallel_size": 2}}
        place, other = folder / "experts" / case, folder / "whole" / case
        jobs[f"{case} experts"] = {**spread, "save": (str(place), 2)}
        jobs[f"resumed {case} experts"] = {**spread, "ckpt": str(place / "step=2.ckpt")}
        jobs[f"whole {case} experts"] = {**whole, "ckpt": str(place / "step=2.ckpt"), "save": (str(other), 2)}
        jobs[f"spread {case} experts"] = {**spread, "ckpt": str(other / "step=4.ckpt")}
    quick = {
        "case": "msamp_o3+fp16", "sizes": {"expert_model_parallel_size": 2, "checkpoint_form": "dp_reshardable"},
        "world": 2, "data_parallel": 2, "transformer": EXPERTS,
    }  # fmt: skip
    jobs["quick experts"] = {**quick, "save": (str(folder / "quick"), 2)}
    jobs["resumed quick experts"] = {**quick, "ckpt": str(folder / "quick" / "step=2.ckpt")}
    return results(2, folder, jobs)


@pytest.mark.parametrize("case", FEW)
def test_experts_that_are_spread_over_processes(case, two):
    run = two(f"{case} experts")
    assert run["losses"][-1] < run["losses"][0] - 0.2
    for rank in range(2):
        assert_resumed(two(f"resumed {case} experts", rank), two(f"{case} experts", rank))


@pytest.mark.parametrize("case", FEW)
def test_experts_on_all_processes_learn_alike(case, two):
    run = two(f"{case} experts")
    for where in ("whole", "spread"):
        found = two(f"{where} {case} experts")
        assert_close(found, run, bound(case))
        assert_norms_close(found, run)


def test_experts_resume_where_parts_are_saved_as_they_lie(two):
    for rank in range(2):
        assert_resumed(two("resumed quick experts", rank), two("quick experts", rank))

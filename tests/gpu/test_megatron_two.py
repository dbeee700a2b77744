"""Megatron-core on two GPUs where their parts differ: any module, FP32 between stages, labels masked unevenly."""

import pytest
import torch

from tests.megatron_cases import OWN, TWO, TWO_GPUS, assert_close, assert_norms_close, bound, results

pytestmark = TWO_GPUS
FULL_WEIGHTS = ["fp16_amp", "te_fp8"]  # whose residual stream is FP32


@pytest.fixture(scope="module")
def alone(megatron_weights, tmp_path_factory):
    jobs = {case: {"case": case, "sizes": {}, "weights": megatron_weights} for case in FULL_WEIGHTS}
    jobs |= {f"any {case}": {"case": case, "sizes": {}, "kind": "any"} for case in OWN}
    jobs["masked"] = {"case": "bf16_mixed", "sizes": {}, "weights": megatron_weights, "masked": True}
    return results(1, tmp_path_factory.mktemp("alone"), jobs)


@pytest.fixture(scope="module")
def two(megatron_weights, tmp_path_factory):
    gpt = {"world": 2, "weights": megatron_weights}
    jobs = {case: {"case": case, "sizes": TWO["pp2"], **gpt} for case in FULL_WEIGHTS}
    for case in OWN:
        jobs[f"any {case}"] = {"case": case, "sizes": {}, "world": 2, "data_parallel": 2, "kind": "any"}
    jobs["masked"] = {"case": "bf16_mixed", "sizes": TWO["cp2"], "masked": True, **gpt}
    return results(2, tmp_path_factory.mktemp("two"), jobs)


@pytest.mark.parametrize("case", FULL_WEIGHTS)
def test_stages_pass_on_fp32(case, alone, two):
    assert_close(two(case), alone(case), bound(case))


@pytest.mark.parametrize("case", OWN)
def test_any_module_learns_the_same_on_two(case, alone, two):
    found, other, wanted = two(f"any {case}"), two(f"any {case}", 1), alone(f"any {case}")
    torch.testing.assert_close(found["val"][-1], wanted["val"][-1], rtol=0, atol=bound(case))
    assert_norms_close(found, wanted)
    assert found["norms"] == other["norms"]
    assert all(torch.equal(other["weights"][n], w) for n, w in found["weights"].items())


def test_context_parallel_processes_with_other_numbers_of_labels(alone, two):
    assert_close(two("masked"), alone("masked"), bound("bf16_mixed"))
    assert_norms_close(two("masked"), alone("masked"), rtol=0.02)

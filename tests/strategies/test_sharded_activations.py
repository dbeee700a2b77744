"""``activations`` in models whose weights are gathered for each pass, and in replicas that are averaged."""

import pytest
import torch

from tests.processes import on_processes
from tests.strategies.test_sharded import Blocks, run
from tests.support import is_low_bit

CHOICES = [None, "fp8", "recompute", "fp8+recompute"]
CASES = ["te_fp8", "msamp_o2", "msamp_o3", "bf16_with_fp8_mixed"]


def every_choice(rank):
    return {(c, case): run(case, rank, Blocks, level={"activations": c}) for c in CHOICES for case in CASES}


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return on_processes(2, tmp_path_factory.mktemp("activations"), every_choice)


@pytest.mark.parametrize("case", CASES)
def test_recomputation_changes_no_bit_of_shards(found, case):
    for rank in found:
        want, got = rank[None, case], rank["recompute", case]
        assert got["losses"] == want["losses"]
        for ours, theirs in zip(got["grads"], want["grads"], strict=True):
            assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("choice", ["fp8", "fp8+recompute"])
def test_shards_train_as_one_process_does(found, case, choice):
    want = run(case, net=Blocks, level={"activations": choice})
    other = found[0][None, case]["grads"][0]
    got = found[0][choice, case]["grads"][0]
    assert any(not torch.equal(got[name], other[name]) for name in got)
    rounding = 0.1 if is_low_bit(case) else 0.02  # gradients in FP8, summed over processes
    for name, grad in want["grads"][0].items():
        assert (got[name] - grad).norm() <= rounding * grad.norm() + 1e-6, name

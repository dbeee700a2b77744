"""What the tests of Megatron-core on one GPU and on two share: cases, parallel sizes, how near is near."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from tests.megatron_jobs import CASES, run_all
from tests.processes import on_processes
from tests.support import level_of

__all__ = [
    "FEW", "ONE_GPU", "OWN", "SENDS", "TWO", "TWO_GPUS", "assert_as_declared", "assert_close", "assert_norms_close",
    "assert_resumed", "bound", "results",
]  # fmt: skip

ONE_GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]
TWO_GPUS = [
    pytest.mark.gpu,
    pytest.mark.multi_gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA GPUs"),
]
TWO = {
    "tp2": {"tensor_model_parallel_size": 2},
    "tp2_sp": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    "pp2": {"pipeline_model_parallel_size": 2},
    "pp2_vpp2": {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2},
    "cp2": {"context_parallel_size": 2},
    "dp2": {},
    "dp2_late": {"overlap_grad_reduce": False, "overlap_param_gather": False},
}
FEW = ["bf16_mixed", "bf16_with_fp8_mixed+fp8_params", "msamp_o2+fp16", "msamp_o3+fp16"]
OWN = [c for c in CASES if "fp8_params" not in c and c != "msamp_o3+fp16"]  # of layers that this package converts
SENDS = ["cp2", "dp2", "dp2_late"]  # context-parallel processes average their gradients, too
COLUMNS = {"Computation (GEMM)", "Weight", "Master weight", "Weight gradient", "Optimizer states"}
# Of losses between 5.6 and 5.1 nats: what other kernels and the order of sums make of the same model and data.
BOUND, BOUND_FP8 = 0.003, 0.03


def bound(*cases):
    """The larger one where a GEMM of one of the cases runs in FP8."""
    return BOUND_FP8 if any(level_of(case).has_fp8 for case in cases) else BOUND


def results(world, folder, *groups):
    """The function that gives a job's result, by the job's name and the rank, and raises the error of a failed job.

    Groups of jobs run side by side, each in ``world`` processes of its own; the jobs of a group follow each other.
    """
    folders = [folder / str(i) for i in range(len(groups))]
    for of_group in folders:
        of_group.mkdir()
    with ThreadPoolExecutor(len(groups)) as pool:
        runs = [
            pool.submit(on_processes, world, of_group, run_all, jobs, backend="nccl")
            for of_group, jobs in zip(folders, groups, strict=True)
        ]
        found = [run.result() for run in runs]
    ranks = [{name: result for group in found for name, result in group[rank].items()} for rank in range(world)]

    def of(name, rank=0):
        result = ranks[rank].get(name, "did not run: one before it failed")
        assert not isinstance(result, str), result
        return result

    return of


def assert_resumed(resumed, whole):
    assert resumed["losses"] == whole["losses"][2:]
    assert resumed["weights"].keys() == whole["weights"].keys()
    assert all(torch.equal(resumed["weights"][n], w) for n, w in whole["weights"].items())


def assert_close(found, wanted, atol):
    torch.testing.assert_close(found["losses"], wanted["losses"][-len(found["losses"]) :], rtol=0, atol=atol)
    torch.testing.assert_close(found["val"][-1], wanted["val"][-1], rtol=0, atol=atol)


def assert_norms_close(found, wanted, rtol=0.15):
    norms = wanted["norms"][-len(found["norms"]) :]
    torch.testing.assert_close(found["norms"], norms, rtol=rtol, atol=0)


def assert_as_declared(run):
    assert {column for column, *_ in run["audit"]} >= COLUMNS
    assert [line for line in run["audit"] if line[2] != line[3]] == []

"""A small part of the faults that the benchmark counts, over NCCL: a dead process, and NaN on one process.

The processes have two GPUs of one machine, or one GPU and the network between two machines.
"""

import pytest
import torch

from benchmarks.fault_trials import SECONDS, Bench
from benchmarks.faults import ON_GPUS, run, to_import
from benchmarks.processes import FORKING

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]

TWO_GPUS = [
    pytest.mark.multi_gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA GPUs"),
]
MACHINES = [pytest.param(1, marks=TWO_GPUS, id="one machine"), pytest.param(2, id="two machines")]

FORMS = ["ddp", "lowprec_ddp", "sharded", "async"]
FAULTS = [
    "nan_before",
    "dead_before",
]  # at bf16_mixed, and at msamp_o2: in the barrier of the exchange of FP8 gradients


@pytest.fixture(scope="module", params=MACHINES)
def trials(request, tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        for name, value in ON_GPUS.items():
            patch.setenv(name, value)
        FORKING.set_forkserver_preload(to_import("cuda", FORMS))
        bench = Bench(tmp_path_factory.mktemp("faults"), mounts=False, device="cuda", machines=request.param)
        return run(bench, FAULTS, FORMS, trials=1, jobs=len(FORMS), seed=0)


@pytest.mark.parametrize("form", FORMS)
def test_nan_on_one_process_skips_the_step_on_both(trials, form):
    (outcome,) = trials[0]["nan_before", form]
    assert outcome.survived, outcome.said


@pytest.mark.parametrize("form", FORMS)
def test_a_dead_process_ends_the_other_one_and_a_restart_goes_on_bit_for_bit(trials, form):
    (outcome,) = trials[0]["dead_before", form]
    assert outcome.survived, outcome.said
    assert 0 < outcome.seconds < SECONDS

"""Signals to processes that train together: all end within seconds, or requeue, and leave whole checkpoints."""

import signal
import tempfile
import time
from pathlib import Path

import pytest
import torch

from benchmarks import fault_job
from benchmarks.fault_callbacks import Killer
from benchmarks.fault_slurm import Slurm
from nemo_lowprec.checkpoint.sharded_folder import is_folder
from tests.processes import FORKING, environment, free_port
from tests.support import assert_same

SECONDS = 20  # from the first one's end to the last one's
SHARDED = ["sharded", "async"]
STRATEGIES = ["ddp", "lowprec_ddp", *SHARDED]


def start(folder, strategy, phases="none", step=-1, number=signal.SIGKILL, level="msamp_o2", env=None):
    """(exit codes, output, times of the ends) of two processes that signal themselves in their ``phases``."""
    port = free_port()
    outputs = [Path(tempfile.mkdtemp(dir=folder.parent)) / "output" for _ in range(2)]
    processes = []
    for rank, output in enumerate(outputs):
        variables = environment(rank, 2, port) | (env(rank) if env else {})
        callbacks = (Killer(phases[rank], step, number),) if phases != "none" else ()
        options = {"requeues": number == signal.SIGUSR1, "validates": "validation" in phases}
        job = (rank, variables, output, folder, strategy, level, callbacks)
        processes.append(FORKING.Process(target=fault_job.main, args=job, kwargs=options))
        processes[-1].start()
    ends = []
    while len(ends) < 2 and (not ends or time.monotonic() - ends[0] < 2 * SECONDS):
        ends += [time.monotonic()] * (sum(not p.is_alive() for p in processes) - len(ends))
        time.sleep(0.05)
    for process in processes:
        process.kill()
        process.join()
    return [p.exitcode for p in processes], "\n".join(o.read_text() for o in outputs), ends


def assert_ended(codes, output, ends, clean=True):
    assert len(ends) == 2 and ends[1] - ends[0] < SECONDS, output
    assert codes == [0, 0] if clean else -signal.SIGKILL not in codes, output


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """What a run ends with that no signal came to."""
    ends = {}
    for strategy in ("ddp", "sharded"):
        folder = tmp_path_factory.mktemp(strategy) / "whole"
        assert_ended(*start(folder, strategy))
        ends[strategy] = torch.load(folder / "end.pt", weights_only=True)
    return ends


def last_of(folder, strategy):
    """The last checkpoint, which is whole."""
    last = folder / "last.ckpt"
    assert is_folder(last) == (strategy in SHARDED)
    return fault_job.opened(last)["global_step"]


def assert_goes_on(folder, strategy, whole):
    assert_ended(*start(folder, strategy))
    assert_same(torch.load(folder / "end.pt", weights_only=True), whole["sharded" if strategy in SHARDED else "ddp"])


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_process_ends_and_a_restart_goes_on_bit_for_bit(tmp_path, whole, strategy):
    """SIGTERM to each process in another phase, or to one alone, and Ctrl+C: step by step of one job."""
    folder = tmp_path / "run"
    for step, phases in ((1, ("forward", "backward")), (2, ("reduction", "step")), (4, ("writing", "none"))):
        assert_ended(*start(folder, strategy, phases, step, signal.SIGTERM))
        assert step <= last_of(folder, strategy) < fault_job.STEPS
    last = last_of(folder, strategy)
    assert_ended(*start(folder, strategy, ("none", "reduction"), last, signal.SIGINT), clean=False)
    assert last <= last_of(folder, strategy) < fault_job.STEPS
    assert_goes_on(folder, strategy, whole)


@pytest.mark.parametrize("strategy", ["lowprec_ddp", "async"])
def test_a_signal_in_validation_ends_every_process(tmp_path, strategy):
    folder = tmp_path / "run"
    assert_ended(*start(folder, strategy, ("validation", "validation"), 2, signal.SIGTERM))
    # One that leaves a validation alone is missed by the other one behind it, if its steps have no collectives.
    for phases in (("none", "validation"), ("validation", "backward")):
        assert_ended(*start(folder, strategy, phases, 4, signal.SIGTERM), clean=strategy in SHARDED)
    assert last_of(folder, strategy) >= 2


@pytest.mark.parametrize("level", ["te_fp8", "bf16_mixed", "fp16_amp"])
def test_levels_whose_gradients_others_average(tmp_path, level):
    folder = tmp_path / "run"
    assert_ended(*start(folder, "ddp", ("forward", "backward"), 2, signal.SIGTERM, level))
    assert last_of(folder, "ddp") >= 2


@pytest.mark.parametrize("strategy", ["ddp", "async"])
def test_slurms_signal_saves_between_two_steps_and_training_goes_on(tmp_path, whole, strategy):
    folder, slurm = tmp_path / "run", Slurm(tmp_path)
    assert_ended(*start(folder, strategy, ("forward", "reduction"), 3, signal.SIGUSR1, env=slurm.environment))
    (saved,) = (tmp_path / "requeued").iterdir()
    assert saved.name == "hpc_ckpt_1.ckpt" and fault_job.opened(saved)["global_step"] == 4
    assert slurm.asked.read_text() == "requeue 7\n"
    assert_same(torch.load(folder / "end.pt", weights_only=True), whole["sharded" if strategy in SHARDED else "ddp"])

"""A process that is killed ends the job; started again, the job goes on bit for bit."""

import tempfile
import time
from pathlib import Path

import pytest
import torch

from benchmarks import fault_job
from benchmarks.fault_callbacks import Killer
from benchmarks.fault_job import TIMEOUT
from nemo_lowprec.checkpoint.sharded_folder import is_folder
from tests.processes import FORKING, environment, free_port
from tests.support import assert_same

# One after the other, each at another step of the same job: strategy, phase, step.
PHASES = ["forward", "backward", "reduction", "step", "checkpoint"]
DEATHS = {
    "ddp": [("ddp", phase, step) for step, phase in enumerate(PHASES, 2)],
    "sharded": [
        ("sharded", "forward", 2), ("async", "backward", 3), ("sharded", "reduction", 4), ("async", "step", 5),
        ("async", "checkpoint", 6), ("sharded", "checkpoint", 6), ("sharded", "writing", 7),
    ],
}  # fmt: skip


def start(folder, strategy, phase="none", step=-1):
    """(exit code, output, seconds after the first one's end) of each of two processes."""
    port = free_port()
    # The one that writes checkpoints is killed while it does; in the other phases it is the other one.
    victim = 0 if phase == "checkpoint" else 1
    outputs = [Path(tempfile.mkdtemp(dir=folder.parent)) / "output" for _ in range(2)]
    processes = []
    for rank, output in enumerate(outputs):
        callbacks = (Killer(phase, step),) if rank == victim else ()
        job = (rank, environment(rank, 2, port), output, folder, strategy, "msamp_o2", callbacks)
        processes.append(FORKING.Process(target=fault_job.main, args=job))
        processes[-1].start()
    processes[victim].join(120)
    died = time.monotonic()
    processes[1 - victim].join(120)
    output = outputs[1 - victim].read_text()
    return processes[victim].exitcode, processes[1 - victim].exitcode, output, time.monotonic() - died


@pytest.mark.parametrize("strategy", DEATHS)
def test_a_killed_process_ends_the_job_and_a_restart_goes_on_bit_for_bit(tmp_path, strategy):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert start(whole, strategy)[:2] == (0, 0)
    for how, phase, step in DEATHS[strategy]:
        victim, survivor, output, seconds = start(killed, how, phase, step)
        assert victim == -9 and survivor not in (0, -9), output
        assert seconds < TIMEOUT + 10, phase
        assert "peer" in output or "timed out" in output.lower() or "timeout" in output.lower(), output
        last = killed / "last.ckpt"
        assert is_folder(last) if strategy == "sharded" else torch.load(last, weights_only=True)
    victim, survivor, output, _ = start(killed, strategy)
    assert (victim, survivor) == (0, 0), output
    if strategy == "ddp":  # in the background the last complete one may be of a step before
        assert "starts at 5" in output  # the death at the checkpoint of step 6 left that of step 5
    assert "starts at 0" not in output
    assert_same(*(torch.load(folder / "end.pt", weights_only=True) for folder in (killed, whole)))
    assert [p.name for p in sorted(killed.iterdir())] == ["end.pt", "last.ckpt"]

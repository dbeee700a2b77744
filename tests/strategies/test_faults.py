"""A process that is killed ends the job; started again, the job goes on bit for bit."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from nemo_lowprec.strategies.sharded_checkpoint import is_folder
from tests.processes import environment, free_port
from tests.support import assert_same

ROOT = Path(__file__).parents[2]
# One after the other, each at another step of the same job: strategy, phase, step.
PHASES = ["forward", "backward", "reduction", "step", "checkpoint"]
DEATHS = {
    "ddp": [("ddp", phase, step) for step, phase in enumerate(PHASES, 2)],
    "sharded": [
        ("sharded", "forward", 2), ("async", "backward", 3), ("sharded", "reduction", 4), ("async", "step", 5),
        ("async", "checkpoint", 6), ("sharded", "checkpoint", 6),
    ],
}  # fmt: skip
TIMEOUT = 30  # of the process group, in fault_job.py


def start(folder, strategy, phase="none", step=-1):
    """(exit code, output, seconds after the first one's end) of each of two processes."""
    port = free_port()
    job = [sys.executable, "-m", "tests.strategies.fault_job", str(folder), strategy, phase, str(step)]
    processes = []
    for rank in range(2):
        own = {**os.environ, **environment(rank, 2, port), "PYTHONPATH": str(ROOT)}
        pipe = subprocess.PIPE
        processes.append(subprocess.Popen(job, cwd=ROOT, env=own, stdout=pipe, stderr=subprocess.STDOUT, text=True))
    victim, survivor = processes if phase == "checkpoint" else reversed(processes)
    outputs = {victim: victim.communicate(timeout=120)[0]}
    died = time.monotonic()
    outputs[survivor] = survivor.communicate(timeout=120)[0]
    return victim.returncode, survivor.returncode, outputs[survivor], time.monotonic() - died


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
    assert "starts at 5" in output  # the death at the checkpoint of step 6 left that of step 5
    assert_same(*(torch.load(folder / "end.pt", weights_only=True) for folder in (killed, whole)))
    assert [p.name for p in sorted(killed.iterdir())] == ["end.pt", "last.ckpt"]

"""A process that is killed ends the job; started again, the job goes on bit for bit."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from tests.processes import environment, free_port
from tests.support import assert_same

ROOT = Path(__file__).parents[2]
# One after the other, each at another step of the same job.
DEATHS = [("forward", 2), ("backward", 3), ("reduction", 4), ("step", 5), ("checkpoint", 6)]
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


@pytest.mark.parametrize("strategy", ["ddp"])
def test_a_killed_process_ends_the_job_and_a_restart_goes_on_bit_for_bit(tmp_path, strategy):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert start(whole, strategy)[:2] == (0, 0)
    for phase, step in DEATHS:
        victim, survivor, output, seconds = start(killed, strategy, phase, step)
        assert victim == -9 and survivor not in (0, -9), output
        assert seconds < TIMEOUT + 10, phase
        assert "peer" in output or "timed out" in output.lower() or "timeout" in output.lower(), output
        torch.load(killed / "last.ckpt", weights_only=True)
    victim, survivor, output, _ = start(killed, strategy)
    assert (victim, survivor) == (0, 0), output
    assert "starts at 5" in output  # the death at the checkpoint of step 6 left that of step 5
    assert_same(*(torch.load(folder / "end.pt", weights_only=True) for folder in (killed, whole)))
    assert not list(killed.glob(".*.part"))

"""Two processes of the job, watched from outside: their output, their steps, and when each ended."""

from __future__ import annotations

import os
import re
import signal
import time
from contextlib import suppress
from multiprocessing.connection import wait
from pathlib import Path

import psutil
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback

from benchmarks import fault_job
from benchmarks.fault_slurm import Slurm
from benchmarks.processes import FORKING, environment

__all__ = ["Pair"]

_POLL = 0.005  # seconds
_LINE = re.compile(r"^step (\d+) (\S+) (True|False)$", re.M)


class Pair:
    """Started at once. The store of the process group is this process's, as with torchrun.

    Args:
        folder: for what the processes print.
        checkpoints: the folder of checkpoints.
        form: a key of ``fault_job.STRATEGIES``.
        level: see ``fault_model.plugin``.
        callbacks: of each process.
        device: of ``fault_job.main``.
        machines: 1 or 2, see ``processes.environment``.
        slurm: what starts the processes; None: torchrun.
    """

    def __init__(
        self, folder: Path, checkpoints: Path, form: str, level: str,
        callbacks: tuple[tuple[Callback, ...], ...] = ((), ()), device: str = "cpu", machines: int = 1,
        slurm: Slurm | None = None,
    ) -> None:  # fmt: skip
        folder.mkdir(parents=True)
        self._store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
        self._outputs = [folder / f"{rank}.txt" for rank in range(2)]
        agent = {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}
        self.processes = []
        self.is_over = False
        for rank, output in enumerate(self._outputs):
            output.touch()
            env = environment(rank, 2, self._store.port, machines) | agent
            env |= slurm.environment(rank, machines) if slurm else {}
            job = (rank, env, output, checkpoints, form, level, callbacks[rank])
            options = {"device": device, "requeues": slurm is not None}
            self.processes.append(FORKING.Process(target=fault_job.main, args=job, kwargs=options))
        for process in self.processes:
            process.start()

    def output(self, rank: int) -> str:
        """What a process has printed so far."""
        return self._outputs[rank].read_text(errors="replace")

    def steps(self, rank: int) -> dict[int, str]:
        """What tells the weights after each step, by the step's number; ``nan`` where they are not finite."""
        return {int(n): text if ok == "True" else "nan" for n, text, ok in _LINE.findall(self.output(rank))}

    def start(self) -> int | None:
        """The step that the run goes on from."""
        found = re.search(r"^starts at (\d+)$", self.output(0), re.M)
        return int(found[1]) if found else None

    def reaches(self, text: str, limit: float) -> bool:
        """Wait until the first process prints ``text``; whether it did, with both alive."""
        end = time.monotonic() + limit
        while time.monotonic() < end and all(p.is_alive() for p in self.processes):
            if text in self.output(0):
                return True
            time.sleep(_POLL)
        return False

    def ends(self, limit: float, after_first: float) -> list[float]:
        """When each process ended with all that it had started, in order.

        Those that had not after ``limit`` seconds, or ``after_first`` behind the first one, are killed and left out.
        """
        found: list[float] = []
        end = time.monotonic() + limit
        left = list(self.processes)
        while left and time.monotonic() < end:
            wait([p.sentinel for p in left if p.is_alive()], 0.1)
            done = [p for p in left if not p.is_alive() and not _started_by(p.pid)]
            left = [p for p in left if p not in done]
            found += [time.monotonic()] * len(done)
            if found:
                end = min(end, found[0] + after_first)
            if not all(p.is_alive() for p in left):
                time.sleep(_POLL)  # for what one has started
        for process in self.processes:
            process.kill()
            process.join()
            if _started_by(process.pid):
                os.killpg(process.pid, signal.SIGKILL)  # type: ignore[arg-type]
        self.is_over = True
        return found

    def send(self, number: int, *ranks: int) -> None:
        """Send a signal to the processes of ``ranks`` that have not ended."""
        for rank in ranks:
            with suppress(ProcessLookupError):
                os.kill(self.processes[rank].pid, number)  # type: ignore[arg-type]

    @property
    def codes(self) -> list[int | None]:
        """Exit codes."""
        return [p.exitcode for p in self.processes]

    def last_line(self, rank: int) -> str:
        """The last line that a process printed, warnings left out: the error, where the process failed."""
        lines = (line for line in self.output(rank).splitlines() if line.strip() and "warn" not in line.lower())
        return next(reversed(list(lines)), "")


def _started_by(process: int | None) -> bool:
    """Whether processes run that ``process``, which has ended, has started."""
    try:
        os.killpg(process, 0)  # type: ignore[arg-type]
    except ProcessLookupError:
        return False
    for other in psutil.process_iter():  # where nobody waits for orphans, they stay as zombies
        with suppress(ProcessLookupError, psutil.NoSuchProcess):
            if os.getpgid(other.pid) == process and other.status() != psutil.STATUS_ZOMBIE:
                return True
    return False

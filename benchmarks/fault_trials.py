"""Trials of faults: a run that is disturbed, and what must hold of it and of the run after it."""

from __future__ import annotations

import random
import re
import shutil
import signal
import tempfile
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks.fault_callbacks import Killer
from benchmarks.fault_job import STEPS, TIMEOUT
from benchmarks.fault_pair import Pair
from benchmarks.fault_slurm import Slurm

__all__ = ["RUN", "SECONDS", "Bench", "NotSurvivedError", "Outcome", "Trial", "levels_of", "need"]

SECONDS = TIMEOUT + 30  # until every process has ended; torch's store waits ten seconds longer than it is told to
RUN = 300.0  # of a whole run, on a machine that is busy
_GONE = re.compile(r"peer|timed ?out|timeout|connection", re.IGNORECASE)


def levels_of(form: str) -> list[str]:
    """The levels that trials of a form go through."""
    if form == "megatron":  # where the layers are this package's
        return ["bf16_mixed", "msamp_o2+fp16", "te_fp8", "fp16_mixed", "msamp_o1+fp16"]
    return ["bf16_mixed", "msamp_o2", "te_fp8", "fp16_mixed", "msamp_o3"]


class NotSurvivedError(Exception):
    """What a trial found that must not be."""


def need(condition: object, said: str, *pairs: Pair) -> None:
    """Raise NotSurvivedError where ``condition`` is false."""
    if not condition:
        outputs = [f"rank {rank}: {pair.output(rank)[-3000:]}" for pair in pairs for rank in range(2)]
        raise NotSurvivedError("\n".join([said, *outputs]))


@dataclass
class Outcome:
    """Of one trial. ``seconds``: from the fault to the last process's end; ``lost``: steps that are made again."""

    survived: bool = True
    said: str = ""
    seconds: float | None = None
    lost: int | None = None
    refused: bool | None = None  # a damaged checkpoint; else its damage has changed nothing


@dataclass
class Whole:
    """A run that nothing disturbed, and its checkpoint in the middle."""

    steps: list[dict[int, str]]
    end: Any
    checkpoint: Path


@dataclass
class Bench:
    """Where trials are made.

    Args:
        place: a folder.
        mounts: whether disks may be mounted there, to be filled.
        device: of ``fault_job.main``.
        machines: of ``Pair``.
    """

    place: Path
    mounts: bool
    device: str = "cpu"
    machines: int = 1
    _pairs: list[Pair] = field(default_factory=list)
    _is_stopped: bool = False
    _wholes: dict[tuple[str, str], Whole | Exception] = field(default_factory=dict)
    _locks: dict[tuple[str, str], threading.Lock] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def start(self, *args: Any, **options: Any) -> Pair:
        """A ``Pair``, which ``stop`` ends."""
        with self._lock:
            need(not self._is_stopped, "No time was left.")
            self._pairs = [pair for pair in self._pairs if not pair.is_over]
            self._pairs.append(Pair(*args, device=self.device, machines=self.machines, **options))
            return self._pairs[-1]

    def stop(self) -> None:
        """Kill all pairs on their way, and start none any more."""
        with self._lock:
            self._is_stopped = True
            for pair in self._pairs:
                if not pair.is_over:
                    pair.send(signal.SIGKILL, 0, 1)

    def whole(self, form: str, level: str) -> Whole:
        """The undisturbed run; made once."""
        key = ("sharded" if form == "async" else form, level)
        with self._lock:
            lock = self._locks.setdefault(key, threading.Lock())
        with lock:
            if key not in self._wholes:
                try:
                    self._wholes[key] = self._make(*key)
                except Exception as error:  # not again for each trial that needs it
                    self._wholes[key] = error
        made = self._wholes[key]
        if isinstance(made, Exception):
            raise made
        return made

    def _make(self, form: str, level: str) -> Whole:
        place = Path(tempfile.mkdtemp(prefix=f"whole-{form}-{level}-", dir=self.place))
        pair = self.start(place / "output", place / "run", form, level)
        pair.ends(RUN, SECONDS)
        need(pair.codes == [0, 0], "The undisturbed run failed.", pair)
        end = torch.load(place / "run" / "end.pt", weights_only=True)
        steps = [pair.steps(rank) for rank in range(2)]
        killer = Killer("forward", STEPS // 2)
        self.start(place / "output2", place / "half", form, level, ((killer,), ())).ends(RUN, SECONDS)
        return Whole(steps, end, place / "half" / "last.ckpt")

    def trial(self, fault: Callable[[Trial, Outcome], None], form: str, level: str, name: str) -> Outcome:
        """Make one trial.

        Args:
            fault: disturbs a run and looks at what becomes of it.
            form: of checkpoint, a key of ``FORMS``.
            level: of ``levels_of(form)``.
            name: no other trial's; what is random follows from it.
        """
        trial = Trial(self, form, level, random.Random(f"{name} {level}"), self.place / name)
        outcome = Outcome()
        try:
            trial.whole = self.whole(form, level)
            fault(trial, outcome)
        except NotSurvivedError as error:
            outcome.survived, outcome.said = False, str(error)
        except Exception:  # of what looks at the run: the other trials go on
            outcome.survived, outcome.said = False, traceback.format_exc()
        else:
            shutil.rmtree(trial.place, ignore_errors=True)
        return outcome


@dataclass
class Trial:
    """One trial on its way: ``runs`` counts the pairs that were started."""

    bench: Bench
    form: str
    level: str
    draw: random.Random
    place: Path
    runs: int = 0
    whole: Whole = None  # type: ignore[assignment]

    @property
    def checkpoints(self) -> Path:
        return self.place / "disk" / "run"

    @property
    def last(self) -> Path:
        return self.checkpoints / "last.ckpt"

    def start(self, callbacks: tuple[Any, Any] = ((), ()), slurm: Slurm | None = None) -> Pair:
        self.runs += 1
        output = self.place / f"output{self.runs}"
        return self.bench.start(output, self.checkpoints, self.form, self.level, callbacks, slurm=slurm)

    @property
    def may_lose(self) -> int:
        """Steps that a sudden end may cost: in the background the last checkpoint is not complete."""
        return 2 if self.form == "async" else 1

    def on(self, rank: int, callback: Any) -> tuple[Any, Any]:
        return tuple((callback,) if r == rank else () for r in range(2))  # type: ignore[return-value]

    # What must hold

    def check_steps(self, pair: Pair, until: int = STEPS) -> None:
        """The weights after each step are those of the undisturbed run."""
        for rank in range(2):
            for step, found in pair.steps(rank).items():
                if step <= until:
                    same = found == self.whole.steps[rank][step]
                    need(same, f"Rank {rank} has other weights after step {step} than the undisturbed run.", pair)

    def check_end(self, pair: Pair) -> None:
        """A run came to the undisturbed run's end."""
        need(pair.codes == [0, 0], f"The run ended with {pair.codes}.", pair)
        self.check_steps(pair)
        end = torch.load(self.checkpoints / "end.pt", weights_only=True)
        need(same(end, self.whole.end), "The run ended with other weights or states than the undisturbed one.", pair)

    def check_ended(self, pair: Pair, ends: list[float], since: float, outcome: Outcome) -> None:
        need(len(ends) == 2, f"A process, or one that it had started, had not ended after {SECONDS} s.", pair)
        outcome.seconds = round(ends[-1] - since, 3)

    def check_said(self, pair: Pair, rank: int) -> None:
        """A process that the other one has left alone says so where it fails."""
        failed, output = pair.codes[rank] != 0, pair.output(rank)
        need(not failed or _GONE.search(output), f"Rank {rank} does not say that the other one was gone.", pair)

    def check_goes_on(self, pair: Pair, outcome: Outcome, may_lose: int) -> None:
        """Started again after ``pair``, the job goes on from its last checkpoint and ends as if nothing had been."""
        self.check_steps(pair)
        done = max([pair.start() or 0, *pair.steps(0), *pair.steps(1)])
        again = self.start()
        again.ends(RUN, SECONDS)
        self.check_end(again)
        left = sorted(path.name for path in self.checkpoints.iterdir())
        need(left == ["end.pt", "last.ckpt"], f"The folder of checkpoints holds {left}.", again)
        started = again.start()
        outcome.lost = max(0, done - (STEPS if started is None else started))
        need(outcome.lost <= may_lose, f"{outcome.lost} steps were lost.", pair, again)


def same(a: Any, b: Any) -> bool:
    """Whether two trees are equal bit for bit."""
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)

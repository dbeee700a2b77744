"""Trials of faults: what goes wrong, and what is to become of it."""

from __future__ import annotations

import itertools
import os
import random
import shutil
import signal
import statistics
import subprocess
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks.fault_callbacks import FullDisk, Killer, Spoiler
from benchmarks.fault_job import STEPS, TIMEOUT
from benchmarks.fault_pair import Pair

__all__ = ["FAULTS", "FORMS", "Bench", "Outcome", "levels_of"]

FORMS = {"lowprec_ddp": "single file", "sharded": "sharded", "async": "async", "megatron": "Megatron's"}
SECONDS = TIMEOUT + 10  # until every process has ended
_RUN = 300.0  # of a whole run, on a machine that is busy
_ROOM = 1 << 16  # bytes that are left for what processes print, where files are limited
_DISK = 16 << 20  # bytes of a disk that may be filled


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
    """

    place: Path
    mounts: bool
    _wholes: dict[tuple[str, str], Whole] = field(default_factory=dict)
    _locks: dict[tuple[str, str], threading.Lock] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def whole(self, form: str, level: str) -> Whole:
        """The undisturbed run; made once."""
        key = ("sharded" if form == "async" else form, level)
        with self._lock:
            lock = self._locks.setdefault(key, threading.Lock())
        with lock:
            if key not in self._wholes:
                self._wholes[key] = self._make(*key)
        return self._wholes[key]

    def _make(self, form: str, level: str) -> Whole:
        place = Path(tempfile.mkdtemp(prefix=f"whole-{form}-{level}-", dir=self.place))
        pair = Pair(place / "output", place / "run", form, level)
        pair.ends(_RUN, SECONDS)
        need(pair.codes == [0, 0], "The undisturbed run failed.", pair)
        end = torch.load(place / "run" / "end.pt", weights_only=True)
        steps = [pair.steps(rank) for rank in range(2)]
        killer = Killer("forward", STEPS // 2)
        Pair(place / "output2", place / "half", form, level, ((killer,), ())).ends(_RUN, SECONDS)
        return Whole(steps, end, place / "half" / "last.ckpt")

    def trial(self, fault: str, form: str, level: str, seed: str) -> Outcome:
        """Make one trial."""
        trial = Trial(self, form, level, random.Random(f"{seed} {fault} {form} {level}"), self.place / seed)
        outcome = Outcome()
        try:
            trial.whole = self.whole(form, level)
            FAULTS[fault][1](trial, outcome)
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

    def start(self, callbacks: tuple[Any, Any] = ((), ())) -> Pair:
        self.runs += 1
        return Pair(self.place / f"output{self.runs}", self.checkpoints, self.form, self.level, callbacks)

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

    def check_goes_on(self, pair: Pair, outcome: Outcome, may_lose: int) -> None:
        """Started again after ``pair``, the job goes on from its last checkpoint and ends as if nothing had been."""
        self.check_steps(pair)
        done = max([pair.start() or 0, *pair.steps(0), *pair.steps(1)])
        again = self.start()
        again.ends(_RUN, SECONDS)
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


# Signals


def _at_random_moment(trial: Trial, act: Callable[[Pair], None], starting: bool = False) -> tuple[Pair, float]:
    """Start a run and do ``act`` to it at a random moment after a random step.

    Args:
        trial: half of which go on from a checkpoint.
        act: gets the pair of processes.
        starting: whether the moment may be before the first step.

    Returns:
        the pair, and when that was.
    """
    for _ in range(5):
        first = trial.draw.choice([0, STEPS // 2])
        if first:  # a checkpoint from elsewhere would not do: Lightning leaves one that it finds, and counts names on
            before = trial.start(trial.on(0, Killer("forward", first)))
            before.ends(_RUN, SECONDS)
            need(before.codes[0] == -signal.SIGKILL, f"The run before ended with {before.codes}.", before)
        pair = trial.start()
        step, times = trial.draw.randrange(first if starting else first + 1, STEPS - 1), []
        if step == first and first:
            pair.reaches("Restoring", _RUN)
            time.sleep(trial.draw.uniform(0, 0.3))
        elif step == first:
            time.sleep(trial.draw.uniform(0, 1))
        else:
            for mark in ("starts at", *(f"step {n} " for n in range(first + 1, step + 1))):
                pair.reaches(mark, _RUN)
                times.append(time.monotonic())
            time.sleep(trial.draw.uniform(0, 2 * statistics.median(b - a for a, b in itertools.pairwise(times))))
        now = time.monotonic()
        if all(p.is_alive() for p in pair.processes):
            act(pair)
            return pair, now
        pair.ends(SECONDS, SECONDS)  # it was over: another moment
        need(pair.codes == [0, 0], f"The run ended with {pair.codes} before anything was done to it.", pair)
        shutil.rmtree(trial.checkpoints, ignore_errors=True)
    raise NotSurvivedError("The job was over before the fault came, five times.")


def kill(trial: Trial, outcome: Outcome) -> None:
    """SIGKILL from outside."""
    rank = trial.draw.randrange(2)
    pair, since = _at_random_moment(trial, lambda pair: pair.processes[rank].kill(), starting=True)
    trial.check_ended(pair, pair.ends(SECONDS, SECONDS), since, outcome)
    trial.check_goes_on(pair, outcome, 2 if trial.form == "async" else 1)


def _kill_in(*phases: str) -> Callable[[Trial, Outcome], None]:
    def act(trial: Trial, outcome: Outcome) -> None:
        own = [p for p in phases if p != "reduction" or ("msamp" in trial.level and trial.form != "megatron")]
        phase, step = trial.draw.choice(own), trial.draw.randrange(1, STEPS - 1)
        # Folders are completed by the first process, which also writes single files.
        by_first = phase == "checkpoint" or (phase == "writing" and trial.form in ("lowprec_ddp", "megatron"))
        rank = 0 if by_first else trial.draw.randrange(2)
        pair = trial.start(trial.on(rank, Killer(phase, step)))
        ends = pair.ends(_RUN, SECONDS)
        need(pair.codes[rank] == -signal.SIGKILL, f"Nothing was killed in {phase} of step {step}: {pair.codes}.", pair)
        trial.check_ended(pair, ends, ends[0], outcome)
        trial.check_goes_on(pair, outcome, 2 if trial.form == "async" else 1)

    return act


def _terminate(everyone: bool) -> Callable[[Trial, Outcome], None]:
    def act(trial: Trial, outcome: Outcome) -> None:
        ranks = [0, 1] if everyone else [trial.draw.randrange(2)]
        trial.draw.shuffle(ranks)

        def send(pair: Pair) -> None:
            for rank in ranks:
                with suppress(ProcessLookupError):
                    os.kill(pair.processes[rank].pid, signal.SIGTERM)  # type: ignore[arg-type]

        pair, since = _at_random_moment(trial, send)
        trial.check_ended(pair, pair.ends(SECONDS, SECONDS), since, outcome)
        need(pair.codes == [0, 0], f"The processes ended with {pair.codes}.", pair)
        trial.check_goes_on(pair, outcome, 0)

    return act


# The disk


@contextmanager
def _disk(place: Path) -> Any:
    """A disk of its own at ``place``, gone afterwards."""
    place.mkdir(parents=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={_DISK}", "tmpfs", place], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", place], check=True)


def _sizes(path: Path) -> list[int]:
    return [p.stat().st_size for p in ([path] if path.is_file() else path.rglob("*")) if p.is_file()]


def disk_full(trial: Trial, outcome: Outcome) -> None:
    """No room is left while a checkpoint is written: at a random byte of it."""
    sizes = _sizes(trial.whole.checkpoint)
    ballast = trial.place / "disk" / "ballast" if trial.bench.mounts else None
    rank = trial.draw.randrange(2) if ballast or trial.form != "lowprec_ddp" else 0
    free = trial.draw.randrange(sum(sizes)) if ballast else trial.draw.randrange(_ROOM, max(sizes))
    with _disk(trial.place / "disk") if ballast else nullcontext():
        pair = trial.start(trial.on(rank, FullDisk(trial.draw.randrange(1, STEPS - 1), free, ballast)))
        ends = pair.ends(_RUN, SECONDS)
        if pair.codes != [0, 0]:
            trial.check_ended(pair, ends, ends[0], outcome)
            for one in range(2):
                line = pair.last_line(one)
                need("NotWrittenError: " in line and str(trial.last) in line, f"Rank {one} said: {line}", pair)
            left = sorted(path.name for path in trial.checkpoints.iterdir())
            need(left == ["last.ckpt"], f"The folder of checkpoints holds {left}.", pair)
        if ballast:
            ballast.unlink()
        trial.check_goes_on(pair, outcome, 2 if trial.form == "async" else 1)


def _damaged(harm: Callable[[random.Random, Path], str]) -> Callable[[Trial, Outcome], None]:
    """A checkpoint of which a file is not what was written: refused, or it was in bytes that carry nothing."""

    def act(trial: Trial, outcome: Outcome) -> None:
        source = trial.whole.checkpoint
        trial.checkpoints.mkdir(parents=True)
        (shutil.copytree if source.is_dir() else shutil.copy)(source, trial.last)
        files = [trial.last] if trial.last.is_file() else sorted(p for p in trial.last.rglob("*") if p.is_file())
        file = trial.draw.choice(files)
        what = harm(trial.draw, file)
        pair = trial.start()
        ends = pair.ends(_RUN, SECONDS)
        trial.check_ended(pair, ends, ends[0] if ends else 0.0, outcome)
        outcome.refused = pair.codes != [0, 0]
        if not outcome.refused:
            trial.check_end(pair)
            return
        for rank in range(2):
            line = pair.last_line(rank)
            named = line.startswith("ValueError: ") and str(trial.last) in line
            need(named and pair.codes[rank] == 1, f"{what}: rank {rank} ended with {line}", pair)
            need(not pair.steps(rank), f"{what}: rank {rank} trained.", pair)

    return act


def _flip(draw: random.Random, file: Path) -> str:
    at, bit = draw.randrange(file.stat().st_size), draw.randrange(8)
    data = bytearray(file.read_bytes())
    data[at] ^= 1 << bit
    file.write_bytes(data)
    return f"bit {bit} of byte {at} of {file.name}"


def _cut(draw: random.Random, file: Path) -> str:
    size = draw.randrange(file.stat().st_size)
    os.truncate(file, size)
    return f"{file.name} cut to {size} bytes"


# Gradients


def _nan(averaged: bool) -> Callable[[Trial, Outcome], None]:
    """A gradient that is NaN on one process: all skip the step, and no other one."""

    def act(trial: Trial, outcome: Outcome) -> None:
        rank, step = trial.draw.randrange(2), trial.draw.randrange(1, STEPS - 1)
        pair = trial.start(trial.on(rank, Spoiler(step, averaged)))
        pair.ends(_RUN, SECONDS)
        need(pair.codes == [0, 0], f"The run ended with {pair.codes}.", pair)
        trial.check_steps(pair, until=step)
        every = [pair.steps(r) for r in range(2)]
        for r, found in enumerate(every):
            need(len(found) == STEPS and "nan" not in found.values(), f"Rank {r} has NaN, or lacks a step.", pair)
            skipped = [n for n in range(2, STEPS + 1) if found[n] == found[n - 1]]
            need(skipped == [step + 1], f"Rank {r} skipped the steps {skipped}, and not {step + 1}.", pair)
        if trial.form not in ("sharded", "async"):  # where each process holds other rows
            need(every[0] == every[1], "Weights differ between processes.", pair)

    return act


FAULTS: dict[str, tuple[str, Callable[[Trial, Outcome], None]]] = {
    "kill": ("SIGKILL of one process, at any moment", kill),
    "dead_before": ("One process dead before averaging", _kill_in("forward", "backward", "reduction")),
    "dead_after": ("One process dead after averaging", _kill_in("averaged", "step")),
    "dead_writing": ("One process dead while it writes", _kill_in("writing", "checkpoint")),
    "term_one": ("SIGTERM to one process", _terminate(everyone=False)),
    "term_all": ("SIGTERM to all processes", _terminate(everyone=True)),
    "disk_full": ("Disk full while a checkpoint is written", disk_full),
    "flipped": ("A flipped bit in the checkpoint", _damaged(_flip)),
    "cut": ("A file of the checkpoint cut short", _damaged(_cut)),
    "nan_before": ("NaN on one process before averaging", _nan(averaged=False)),
    "nan_after": ("NaN on one process after averaging", _nan(averaged=True)),
}

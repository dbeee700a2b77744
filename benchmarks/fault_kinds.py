"""The faults: how each disturbs a run, and what must hold afterwards."""

from __future__ import annotations

import itertools
import os
import random
import shutil
import signal
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path

from benchmarks.fault_callbacks import FullDisk, Killer, Spoiler
from benchmarks.fault_job import STEPS
from benchmarks.fault_pair import Pair
from benchmarks.fault_trials import RUN, SECONDS, NotSurvivedError, Outcome, Trial, need

__all__ = ["FAULTS"]

_ROOM = 1 << 16  # bytes that are left for what processes print, where files are limited
_DISK = 16 << 20  # bytes of a disk that may be filled


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
            before.ends(RUN, SECONDS)
            need(before.codes[0] == -signal.SIGKILL, f"The run before ended with {before.codes}.", before)
        pair = trial.start()
        step, times = trial.draw.randrange(first if starting else first + 1, STEPS - 2), []
        if step == first and first:
            pair.reaches("Restoring", RUN)
            time.sleep(trial.draw.uniform(0, 0.3))
        elif step == first:
            time.sleep(trial.draw.uniform(0, 1))
        else:
            for mark in ("starts at", *(f"step {n} " for n in range(first + 1, step + 1))):
                pair.reaches(mark, RUN)
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
        ends = pair.ends(RUN, SECONDS)
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
        is_over = all(STEPS in pair.steps(rank) for rank in range(2))  # a signal behind the last step ends what is left
        need(pair.codes == [0, 0] or is_over, f"The processes ended with {pair.codes}.", pair)
        trial.check_goes_on(pair, outcome, 0)

    return act


# The disk


@contextmanager
def _disk(place: Path) -> Iterator[None]:
    """A disk of its own at ``place``, gone afterwards."""
    place.mkdir(parents=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={_DISK}", "tmpfs", place], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", place], check=True)


def disk_full(trial: Trial, outcome: Outcome) -> None:
    """No room is left while a checkpoint is written: at a random byte of it."""
    saved = trial.whole.checkpoint
    sizes = {p.name: p.stat().st_size for p in ([saved] if saved.is_file() else saved.iterdir())}
    ballast = trial.place / "disk" / "ballast" if trial.bench.mounts else None
    # The first process alone writes a single file, and most of Megatron's form.
    rank = trial.draw.randrange(2) if trial.form in ("sharded", "async") else 0
    if ballast:
        free = trial.draw.randrange(int(0.9 * sum(sizes.values())))
    else:
        own = [size for name, size in sizes.items() if saved.is_file() or name.startswith(f"__{rank}_")]
        free = trial.draw.randrange(_ROOM, max(own))
    first = 2 if trial.form == "async" else 1  # a checkpoint is complete by then
    with _disk(trial.place / "disk") if ballast else nullcontext():
        pair = trial.start(trial.on(rank, FullDisk(trial.draw.randrange(first, STEPS - 1), free, ballast)))
        ends = pair.ends(RUN, SECONDS)
        # In the background an earlier checkpoint may be removed later, and make room for all that come.
        need(pair.codes != [0, 0] or trial.form == "async", "The disk was not full.", pair)
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
        ends = pair.ends(RUN, SECONDS)
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
        pair.ends(RUN, SECONDS)
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


# By their names in the results; fault_tables.py has their titles.
FAULTS: dict[str, Callable[[Trial, Outcome], None]] = {
    "kill": kill,
    "dead_before": _kill_in("forward", "backward", "reduction"),
    "dead_after": _kill_in("averaged", "step"),
    "dead_writing": _kill_in("writing", "checkpoint"),
    "term_one": _terminate(everyone=False),
    "term_all": _terminate(everyone=True),
    "disk_full": disk_full,
    "flipped": _damaged(_flip),
    "cut": _damaged(_cut),
    "nan_before": _nan(averaged=False),
    "nan_after": _nan(averaged=True),
}

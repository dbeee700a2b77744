"""The faults: how each disturbs a run, and what must hold afterwards."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

from benchmarks.fault_callbacks import FullDisk, Spoiler
from benchmarks.fault_job import STEPS
from benchmarks.fault_signals import hang, interrupt, kill, kill_in, requeue, terminate
from benchmarks.fault_trials import RUN, SECONDS, Outcome, Trial, need

__all__ = ["FAULTS"]

_ROOM = 1 << 16  # bytes that are left for what processes print, where files are limited
_DISK = 16 << 20  # bytes of a disk that may be filled


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
        trial.check_goes_on(pair, outcome, trial.may_lose)


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
    "dead_before": kill_in("forward", "backward", "reduction"),
    "dead_after": kill_in("averaged", "step"),
    "dead_writing": kill_in("writing", "checkpoint"),
    "hang": hang,
    "int_one": interrupt(everyone=False),
    "int_all": interrupt(everyone=True),
    "term_one": terminate(everyone=False),
    "term_all": terminate(everyone=True),
    "requeue": requeue,
    "disk_full": disk_full,
    "flipped": _damaged(_flip),
    "cut": _damaged(_cut),
    "nan_before": _nan(averaged=False),
    "nan_after": _nan(averaged=True),
}

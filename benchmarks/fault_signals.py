"""The faults that are signals: from outside at a random moment, or SIGKILL in one phase of a step."""

from __future__ import annotations

import itertools
import shutil
import signal
import statistics
import time
from collections.abc import Callable

from benchmarks.fault_callbacks import Killer
from benchmarks.fault_job import STEPS, opened
from benchmarks.fault_pair import Pair
from benchmarks.fault_slurm import Slurm
from benchmarks.fault_trials import RUN, SECONDS, NotSurvivedError, Outcome, Trial, need

__all__ = ["hang", "interrupt", "kill", "kill_in", "requeue", "terminate"]

_Act = Callable[[Pair], None]


def _at_random_moment(
    trial: Trial, act: _Act, starting: bool = False, slurm: Slurm | None = None
) -> tuple[Pair, float]:
    """Start a run and do ``act`` to it at a random moment after a random step.

    Args:
        trial: half of which go on from a checkpoint.
        act: gets the pair of processes.
        starting: whether the moment may be before the first step.
        slurm: what starts the run.

    Returns:
        the pair, and when that was.
    """
    for _ in range(5):
        first = trial.draw.choice([0, STEPS // 2])
        if first:  # a checkpoint from elsewhere would not do: Lightning leaves one that it finds, and counts names on
            before = trial.start(trial.on(0, Killer("forward", first)))
            before.ends(RUN, SECONDS)
            need(before.codes[0] == -signal.SIGKILL, f"The run before ended with {before.codes}.", before)
        pair = trial.start(slurm=slurm)
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


def _ranks(trial: Trial, everyone: bool) -> list[int]:
    ranks = [0, 1] if everyone else [trial.draw.randrange(2)]
    trial.draw.shuffle(ranks)
    return ranks


def _is_over(pair: Pair) -> bool:
    return all(STEPS in pair.steps(rank) for rank in range(2))


def kill(trial: Trial, outcome: Outcome) -> None:
    """SIGKILL from outside."""
    rank = trial.draw.randrange(2)
    pair, since = _at_random_moment(trial, lambda pair: pair.send(signal.SIGKILL, rank), starting=True)
    trial.check_ended(pair, pair.ends(SECONDS, SECONDS), since, outcome)
    trial.check_said(pair, 1 - rank)
    trial.check_goes_on(pair, outcome, trial.may_lose)


def kill_in(*phases: str) -> Callable[[Trial, Outcome], None]:
    """SIGKILL of one process in one of ``phases``, see ``Killer``."""

    def act(trial: Trial, outcome: Outcome) -> None:
        own = [p for p in phases if p != "reduction" or ("msamp" in trial.level and trial.form != "megatron")]
        phase, step = trial.draw.choice(own), trial.draw.randrange(1, STEPS - 1)
        # Folders are completed by the first process, which also writes single files.
        by_first = phase == "checkpoint" or (phase == "writing" and trial.form not in ("sharded", "async"))
        rank = 0 if by_first else trial.draw.randrange(2)
        pair = trial.start(trial.on(rank, Killer(phase, step)))
        ends = pair.ends(RUN, SECONDS)
        need(pair.codes[rank] == -signal.SIGKILL, f"Nothing was killed in {phase} of step {step}: {pair.codes}.", pair)
        trial.check_ended(pair, ends, ends[0], outcome)
        trial.check_said(pair, 1 - rank)
        trial.check_goes_on(pair, outcome, trial.may_lose)

    return act


def hang(trial: Trial, outcome: Outcome) -> None:
    """SIGSTOP of one process. It goes on when the other one has ended, and ends, too."""
    rank = trial.draw.randrange(2)
    pair, since = _at_random_moment(trial, lambda pair: pair.send(signal.SIGSTOP, rank))
    pair.processes[1 - rank].join(SECONDS)
    gave_up, now = not pair.processes[1 - rank].is_alive(), time.monotonic()
    pair.send(signal.SIGCONT, rank)
    ends = pair.ends(SECONDS, SECONDS)
    need(gave_up, f"Rank {1 - rank} had not ended {SECONDS} s after the other one stopped.", pair)
    trial.check_ended(pair, ends, since, outcome)
    outcome.seconds = round(now - since, 3)
    trial.check_said(pair, 1 - rank)
    trial.check_goes_on(pair, outcome, trial.may_lose)


def terminate(everyone: bool) -> Callable[[Trial, Outcome], None]:
    """SIGTERM, which saves and ends the run between two steps."""

    def act(trial: Trial, outcome: Outcome) -> None:
        ranks = _ranks(trial, everyone)
        pair, since = _at_random_moment(trial, lambda pair: pair.send(signal.SIGTERM, *ranks))
        trial.check_ended(pair, pair.ends(SECONDS, SECONDS), since, outcome)
        # A signal behind the last step ends what is left.
        need(pair.codes == [0, 0] or _is_over(pair), f"The processes ended with {pair.codes}.", pair)
        trial.check_goes_on(pair, outcome, 0)

    return act


def interrupt(everyone: bool) -> Callable[[Trial, Outcome], None]:
    """SIGINT, as of Ctrl+C: ends the run where it is."""

    def act(trial: Trial, outcome: Outcome) -> None:
        ranks = _ranks(trial, everyone)
        pair, since = _at_random_moment(trial, lambda pair: pair.send(signal.SIGINT, *ranks))
        trial.check_ended(pair, pair.ends(SECONDS, SECONDS), since, outcome)
        need(pair.codes != [0, 0] or _is_over(pair), "The run was not interrupted.", pair)
        trial.check_goes_on(pair, outcome, trial.may_lose)

    return act


def requeue(trial: Trial, outcome: Outcome) -> None:
    """SIGUSR1 of Slurm to both: saves, asks for the job to be requeued, and trains on; the job begun anew goes on."""
    slurm = Slurm(trial.place / "slurm")
    pair, _ = _at_random_moment(trial, lambda pair: pair.send(signal.SIGUSR1, 0, 1), slurm=slurm)
    pair.ends(RUN, SECONDS)
    saved = list((trial.checkpoints.parent / "requeued").glob("*"))
    if not saved and _is_over(pair):  # a signal behind the last step saves nothing
        return
    trial.check_end(pair)
    names, asked = [path.name for path in saved], slurm.asked.read_text() if slurm.asked.exists() else ""
    need(names == ["hpc_ckpt_1.ckpt"], f"Slurm's signal saved {names}.", pair)
    need(asked == "requeue 7\n", f"Slurm was asked: {asked}", pair)
    step = opened(saved[0])["global_step"]
    shutil.rmtree(trial.checkpoints)
    again = trial.start(slurm=slurm)
    again.ends(RUN, SECONDS)
    trial.check_end(again)
    need(again.start() == step, f"The job went on from step {again.start()}, and {step} was saved.", again)
    outcome.lost = 0

"""Processes that prepare side by side, and then work one after the other."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Sequence
from multiprocessing.synchronize import Event
from typing import Any

__all__ = ["in_turns"]

_CONTEXT = multiprocessing.get_context("spawn")


def in_turns(
    prepare: Callable[[], None], work: Callable[..., None], jobs: Sequence[tuple[Any, ...]], ahead: int
) -> None:  # fmt: skip
    """Call ``work(*job)`` for each job in order, in a process of its own that has called ``prepare()`` before.

    Args:
        prepare: work that takes long and uses no GPU, such as imports.
        ahead: processes that are there at a time, the working one included.

    Raises:
        RuntimeError: a process failed.
    """
    processes: list[Any] = []
    turns = [_CONTEXT.Event() for _ in jobs]
    try:
        for index, turn in enumerate(turns):
            while len(processes) < min(len(jobs), index + ahead):
                next_one = len(processes)
                job = (prepare, work, jobs[next_one], turns[next_one])
                processes.append(_CONTEXT.Process(target=_run, args=job))
                processes[-1].start()
            turn.set()
            processes[index].join()
            if processes[index].exitcode:
                raise RuntimeError(f"The process of {jobs[index]} ended with {processes[index].exitcode}.")
    finally:
        for process in processes:
            process.kill()
            process.join()


def _run(prepare: Callable[[], None], work: Callable[..., None], job: tuple[Any, ...], turn: Event) -> None:
    prepare()
    turn.wait()
    work(*job)

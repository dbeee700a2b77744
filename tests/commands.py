"""``nemo-lowprec`` in processes that have imported already what takes seconds to import."""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from tests.processes import FORKING, of_a_shell

__all__ = ["Answer", "answer"]


class Answer:
    """What a command has ended with.

    Attributes:
        status: as a shell sees it.
        printed: to stdout and stderr.
    """

    def __init__(self, status: int | None, printed: str) -> None:
        self.status, self.printed = status, printed


def answer(folder: Path, arguments: Sequence[str], seconds: int = 300) -> Answer:
    """Run ``nemo-lowprec`` in ``folder`` with the words of a command line that come after it.

    As a shell would, but for imports that were made before. Where these count, or where Lightning starts more
    processes by the command line of the first, start the command itself.
    """
    out = folder / ".printed"
    process = FORKING.Process(target=_start, args=(list(arguments), str(folder), str(out)))
    process.start()
    process.join(seconds)
    if process.is_alive():
        process.kill()
        process.join()
    printed = out.read_text()
    out.unlink()
    return Answer(process.exitcode, printed)


def _start(arguments: list[str], folder: str, out: str) -> None:
    file = os.open(out, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for stream, target in ((0, nothing), (1, file), (2, file)):
        os.dup2(target, stream)
    for text in (sys.stdout, sys.stderr):
        text.reconfigure(write_through=True)
    environment = of_a_shell(OMP_NUM_THREADS="1")
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    torch.set_num_threads(1)
    multiprocessing.set_start_method(None, force=True)  # the system's own, and not that of this process
    sys.argv = ["nemo-lowprec", *arguments]
    from nemo_lowprec.cli import main

    sys.exit(main())

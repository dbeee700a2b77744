"""Slurm's part in a job of two processes: their variables, and an ``scontrol`` that writes down what it is asked."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["Slurm"]


class Slurm:
    """Starts job 7.

    Args:
        place: a folder for ``scontrol``.

    Attributes:
        asked: the file to which ``scontrol`` appends its arguments, a line a call.
    """

    def __init__(self, place: Path) -> None:
        self.asked = place / "asked"
        self._bin = place / "bin"
        self._bin.mkdir(parents=True)
        script = self._bin / "scontrol"
        script.write_text(f"#!/bin/sh\necho $* >> {self.asked}\n")
        script.chmod(0o755)

    def environment(self, rank: int, machines: int = 1) -> dict[str, str]:
        """The environment variables of Slurm for one process of 1 or 2 machines, ``scontrol`` first in the path."""
        tasks = 2 // machines
        numbers = {
            "PROCID": rank, "LOCALID": rank % tasks, "NODEID": rank // tasks, "NTASKS": 2, "NTASKS_PER_NODE": tasks,
            "JOB_ID": 7,
        }  # fmt: skip
        variables = {f"SLURM_{name}": str(number) for name, number in numbers.items()}
        return {**variables, "SLURM_JOB_NAME": "run", "PATH": f"{self._bin}:{os.environ['PATH']}"}

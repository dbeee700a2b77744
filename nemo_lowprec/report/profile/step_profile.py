"""The profile of a run's steps, and the file ``profile.json`` that holds it."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from nemo_lowprec.checkpoint.writing import file_in_place
from nemo_lowprec.report.profile.kinds import KINDS
from nemo_lowprec.report.profile.timeline import WAITS

FILE, HALF_FILE = "profile.json", "profile_bf16.json"  # of a level, and of the same model in BF16
PARTS = (*KINDS, WAITS)


@dataclass(frozen=True)
class StepProfile:
    """Where the time of a training step goes.

    Attributes:
        about: the run, as in the first record of ``monitor.jsonl``.
        ms: wall time of a step, without the profiler.
        layers: name of a module (empty: no module) to µs of a step by part; the parts are ``PARTS``.
        launches: name of a module to the number of its kernels in a step.
        linears: names of the linear layers.
        low: names of linear layers whose GEMMs run in FP8.
        groups: names of linear layers that compute as one.
        matched: the share of the GPU's time whose layers are known.
    """

    about: dict[str, Any]
    ms: float
    layers: dict[str, dict[str, float]]
    launches: dict[str, float]
    linears: list[str]
    low: list[str]
    groups: list[list[str]]
    matched: float

    def parts(self) -> dict[str, float]:
        """ms of a step by part."""
        return {part: sum(us.get(part, 0.0) for us in self.layers.values()) / 1e3 for part in PARTS}

    def save(self, path: Path) -> None:
        """Write the profile into a file."""
        path.parent.mkdir(parents=True, exist_ok=True)
        with file_in_place(path) as file:
            file.write(json.dumps(asdict(self), allow_nan=False).encode())


def read_profile(path: str | Path) -> StepProfile:
    """The profile in a file.

    Raises:
        ValueError: there is no profile.
    """
    try:
        return StepProfile(**json.loads(Path(path).read_text()))
    except (OSError, ValueError, TypeError) as error:
        raise ValueError(f"{path} holds no profile of a step: nemo-lowprec profile writes one.") from error

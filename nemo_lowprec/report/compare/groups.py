"""Runs that differ only in their seed, as one group."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from nemo_lowprec.report.monitor.runs import Run, read_run

REFERENCE = "bf16_mixed"
_MOST = 10  # lines of a chart that a reader can tell apart


@dataclass
class Group:
    """The runs of one level with the same options.

    Attributes:
        label: name of the level, and its options where the level has several groups.
        runs: one for each seed.
    """

    label: str
    runs: list[Run]

    @property
    def seeds(self) -> list[int | None]:
        """The seeds of the runs; None where the file of a run does not have it."""
        return [run.about["seed"] for run in self.runs]


def read_groups(folders: Sequence[str | Path]) -> list[Group]:
    """Read runs and group them, the reference (``bf16_mixed``, else the level of the first run) first.

    Raises:
        ValueError: fewer than two runs, runs of different models, more groups than a chart shows, a folder without a
            run, or a run without losses.
    """
    if len(folders) < 2:
        raise ValueError("compare needs the folders of two runs or more.")
    runs = [read_run(folder) for folder in folders]
    for folder, run in zip(folders, runs, strict=True):
        if not run.loss:
            raise ValueError(f"{folder} has no loss yet: there is nothing to compare.")
        first = runs[0].about
        if run.about["parameters"] != first["parameters"]:
            sizes = f"{first['parameters']:,} and {run.about['parameters']:,} parameters"
            raise ValueError(f"{folders[0]} and {folder} are runs of two models ({sizes}): compare runs of one.")
    groups = _grouped(runs)
    if len(groups) > _MOST:
        raise ValueError(f"{len(groups)} levels are more than a chart shows: compare at most {_MOST}.")
    return sorted(groups, key=lambda group: group.runs[0].about["level"] != REFERENCE)


def _grouped(runs: Sequence[Run]) -> list[Group]:
    by_options: dict[str, dict[str, list[Run]]] = {}
    for run in runs:
        by_options.setdefault(run.about["level"], {}).setdefault(run.about["options"], []).append(run)
    return [
        Group(f"{level} {options}".rstrip() if len(of_level) > 1 else level, members)
        for level, of_level in by_options.items()
        for options, members in of_level.items()
    ]

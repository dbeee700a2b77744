"""The table at the end of ``nemo-lowprec pretrain -m``: one row for each run."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

__all__ = ["SweptRun", "print_sweep"]

_FIGURES = {"Val loss": "{:.4f}", "Perplexity": "{:.2f}", "Tokens/s": "{:,.0f}"}


@dataclass(frozen=True)
class SweptRun:
    """One run of a sweep.

    Attributes:
        folder: of the run, below the folder of the sweep.
        overrides: of the run.
        result: a ``PretrainResult``; None where the run failed.
        failure: what ended it.
    """

    folder: str
    overrides: tuple[str, ...]
    result: Any = None
    failure: BaseException | None = None


def print_sweep(runs: Sequence[SweptRun]) -> None:
    """Print what differs between the runs, and what each came to; nothing without a run that trained."""
    if not any(getattr(run.result, "steps", None) for run in runs) or int(os.environ.get("LOCAL_RANK", "0")):
        return
    shared = set.intersection(*(set(run.overrides) for run in runs))
    table = Table(title="Runs of this sweep")
    table.add_column("Run", overflow="fold")
    table.add_column("Overrides", overflow="fold")
    for heading in _FIGURES:
        table.add_column(heading, justify="right", no_wrap=True)
    for run in runs:
        shown = {*shared, f"precision={run.folder.partition('_')[2]}"}
        own = "\n".join(override for override in run.overrides if override not in shown)
        if run.result is None:
            table.add_row(run.folder, own, "failed", "", "")
            continue
        found = (run.result.val_loss, run.result.perplexity, run.result.tokens_per_sec)
        cells = ["-" if v is None else form.format(v) for v, form in zip(found, _FIGURES.values(), strict=True)]
        table.add_row(run.folder, own, *cells)
    Console().print(table)

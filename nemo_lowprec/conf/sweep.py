"""Runs of ``nemo-lowprec pretrain -m``: each run starts its own processes, and a table at the end lists all runs."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from hydra.core.hydra_config import HydraConfig
from omegaconf import open_dict, read_write
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

_FIGURES = {"Val loss": "{:.4f}", "Perplexity": "{:.2f}", "Tokens/s": "{:,.0f}"}


@dataclass(frozen=True)
class SweptRun:
    """One run of a sweep.

    Attributes:
        folder: the run's folder, below the folder of the sweep.
        overrides: the run's overrides.
        result: a ``PretrainResult``; None where the run failed.
    """

    folder: str
    overrides: tuple[str, ...]
    result: Any = None


@contextmanager
def one_run(program: Sequence[str], flags: Sequence[str]) -> Iterator[list[str]]:
    """Yields the command line that repeats one run of a sweep alone, in the run's folder, and cleans up after the run.

    Lightning starts the other processes of a run with this command line. After a run Lightning leaves a process group
    and environment variables (``LOCAL_RANK``) behind, which would make the next run one process of many.

    Args:
        program: the program and its subcommand.
        flags: Hydra's flags, without ``-m``.
    """
    settings: Any = HydraConfig.get()
    environment = dict(os.environ)
    with read_write(settings), open_dict(settings):
        settings.run.dir = settings.runtime.output_dir
    try:
        yield [*program, *flags, *settings.overrides.task]
    finally:
        os.environ.clear()
        os.environ.update(environment)
        distributed = sys.modules.get("torch.distributed")
        if distributed is not None and distributed.is_initialized():
            distributed.destroy_process_group()


def print_sweep(runs: Sequence[SweptRun], folder: str) -> None:
    """Print the overrides that differ between the runs, and each run's figures; nothing where no run trained.

    Args:
        runs: in their order.
        folder: the folder of the sweep.
    """
    if not any(getattr(run.result, "steps", None) for run in runs) or int(os.environ.get("LOCAL_RANK", "0")):
        return
    shared = set.intersection(*(set(run.overrides) for run in runs))
    table = Table(box=SIMPLE_HEAD, show_edge=False)
    table.add_column("Run", overflow="fold")
    for heading in _FIGURES:
        table.add_column(heading, justify="right", no_wrap=True)
    for run in runs:
        shown = {*shared, f"precision={run.folder.partition('_')[2]}"}
        name = "\n  ".join([run.folder, *(override for override in run.overrides if override not in shown)])
        if run.result is None:
            table.add_row(name, "failed", "", "")
            continue
        found = (run.result.val_loss, run.result.perplexity, run.result.tokens_per_sec)
        cells = ["-" if v is None else form.format(v) for v, form in zip(found, _FIGURES.values(), strict=True)]
        table.add_row(name, *cells)
    print(f"\nRuns of this sweep, in {folder}", flush=True)
    Console().print(table)

"""What the Trainer shows at its start: the level, and which layers run at it."""

from __future__ import annotations

import re
from collections import defaultdict

from lightning.pytorch.utilities.rank_zero import rank_zero_only
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from nemo_lowprec.engine import Engine

__all__ = ["print_summary", "summary_tables"]

_EXAMPLES = 3


def summary_tables(engine: Engine, title: object) -> list[Text | Table]:
    """The chart's row, then the layers by what became of them and why."""
    heading = Text(f"Precision: {title}", style="bold")
    row = Table(show_header=False, box=SIMPLE_HEAD)
    stored_fp8 = engine.recipe is not None and engine.recipe.fp8_params
    for column, cell in engine.level.columns(stored_fp8).items():
        if column != "Level":
            row.add_row(column, cell)
    if engine.recipe is None:
        return [heading, row]
    assert engine.backend is not None
    layers = Table("Layers", "Are", "Why", "Which", box=SIMPLE_HEAD)
    conversion = engine.conversion
    gemm = f"{engine.level.compute.upper()} ({engine.recipe.scaling}, {engine.backend.name})"
    for names, now in ((conversion.low, gemm), (conversion.norms, "norm with half output")):
        if names:
            layers.add_row(str(len(names)), now, "", _shorten(names))
    by_reason: dict[str, list[str]] = defaultdict(list)
    for name, reason in conversion.kept.items():
        by_reason[reason].append(name)
    for reason, names in by_reason.items():
        layers.add_row(str(len(names)), "half precision", reason, _shorten(names))
    if not conversion.low:
        layers.add_row("0", gemm, "no layer of the model can be converted", "")
    return [heading, row, layers]


def _shorten(names: list[str]) -> str:
    patterns = list(dict.fromkeys(re.sub(r"\.\d+(?=\.|$)", ".*", name) for name in names))
    more = f" and {len(patterns) - _EXAMPLES} more" if len(patterns) > _EXAMPLES else ""
    return ", ".join(patterns[:_EXAMPLES]) + more


@rank_zero_only
def print_summary(engine: Engine, title: object) -> None:
    """Print the tables once."""
    console = Console()
    for table in summary_tables(engine, title):
        console.print(table)

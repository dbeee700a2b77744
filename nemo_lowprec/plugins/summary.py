"""What the Trainer shows at its start: the level, and which layers run at it."""

from __future__ import annotations

from lightning.pytorch.utilities.rank_zero import rank_zero_only, rank_zero_warn
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from nemo_lowprec.engine import Engine

__all__ = ["print_summary", "summary_tables"]


def summary_tables(engine: Engine, title: object) -> tuple[list[Text | Table], str | None]:
    """The chart's row, then the layers by what became of them and why; and what to warn of."""
    heading = Text(f"Precision: {title}", style="bold")
    row = Table(show_header=False, box=SIMPLE_HEAD)
    stored_fp8 = engine.recipe is not None and engine.recipe.fp8_params
    for column, cell in engine.level.columns(stored_fp8).items():
        if column != "Level":
            row.add_row(column, cell)
    found = engine.describe_layers()
    return ([heading, row], None) if found is None else ([heading, row, found[0]], found[1])


@rank_zero_only
def print_summary(engine: Engine, title: object) -> None:
    """Print the tables once, and warn where hardly anything is converted."""
    tables, problem = summary_tables(engine, title)
    console = Console()
    for table in tables:
        console.print(table)
    if problem:
        rank_zero_warn(problem)

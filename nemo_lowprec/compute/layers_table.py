"""The start-up table of a model's layers and matrices, and the warning where hardly any is converted."""

from __future__ import annotations

from io import StringIO

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Column, Table
from torch import nn

from nemo_lowprec.chart import PrecisionLevel
from nemo_lowprec.compute.convert import Conversion
from nemo_lowprec.compute.coverage import Group, as_patterns, groups_of, too_little

__all__ = ["as_text", "describe_layers", "layers_table"]

_EXAMPLES = 3
_ARE = {
    "te": "{low}, by Transformer Engine",
    "norm": "norm with half output",
    "half": "half precision",
    "asked": "half precision",
    "embedding": "no GEMM",
}


def layers_table(groups: list[Group], low: str) -> Table:
    """How many layers, their share of the elements of all matrices, what they are and why, and which; in 80 columns.

    Args:
        low: how the converted ones compute, for example ``FP8 (delayed, te)``.
    """
    share = Column("Share", justify="right", no_wrap=True)
    # Names are long and have no spaces: they get two thirds of what is left of a line.
    are, which = Column("Are", ratio=1), Column("Which", ratio=2, overflow="fold")
    table = Table("Layers", share, are, which, box=SIMPLE_HEAD, expand=True)
    total = sum(group.elements for group in groups)
    for group in groups:
        kind, reason, _ = group.fate
        part = f"{100 * group.elements / total:.1f} %" if group.elements else ""
        what = low if kind == "low" else _ARE[kind].format(low=low.partition(" ")[0])
        table.add_row(str(len(group.names)), part, f"{what}: {reason}" if reason else what, _shorten(group.names))
    if not any(group.is_low for group in groups):
        table.add_row("0", "", f"{low}: no layer of the model can be converted", "")
    return table


def describe_layers(
    model: nn.Module, conversion: Conversion, level: PrecisionLevel, how: str
) -> tuple[Table, str | None]:
    """The table of a converted model, and what to warn of; None where enough is converted.

    Args:
        how: scaling and backend of the GEMMs.
    """
    groups = groups_of(model, conversion)
    problem = too_little(groups)
    return layers_table(groups, f"{level.compute.upper()} ({how})"), problem and f"{level.name}: {problem}"


def as_text(table: Table) -> str:
    """The table in lines of 80 characters."""
    console = Console(width=80, file=StringIO())
    with console.capture() as capture:
        console.print(table)
    return capture.get()


def _shorten(names: list[str]) -> str:
    found = as_patterns(names)
    more = f" and {len(found) - _EXAMPLES} more" if len(found) > _EXAMPLES else ""
    return ", ".join(found[:_EXAMPLES]) + more

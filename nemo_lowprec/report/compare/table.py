"""A comparison in the terminal, in 80 columns."""

from __future__ import annotations

import re

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from nemo_lowprec.lines import WIDTH, text_lines
from nemo_lowprec.report.compare.comparison import Comparison
from nemo_lowprec.report.compare.words import HEADINGS, cells, sentences

_LABEL = 20  # letters of a line


def print_comparison(comparison: Comparison) -> None:
    """Print the table of all levels, and a sentence on each."""
    reference = comparison.outcomes[0].group.label
    loss = "validation loss" if comparison.by_validation else "training loss over the last tenth of the steps"
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    for index, heading in enumerate(HEADINGS):
        of_level = index == 0
        table.add_column(
            heading.replace(" ", "\n").replace("/param", "/\nparam"),
            justify="left" if of_level else "right",
            no_wrap=True,
        )
    for outcome in comparison.outcomes:
        label, *others = cells(outcome)
        table.add_row(_folded(label), *others)
    print("\n".join(text_lines(f"Levels beside {reference}: {loss}, gap with its 95 % interval over paired seeds.")))
    Console(width=WIDTH).print(table)
    for label, said, _ in sentences(comparison):
        print("\n".join(text_lines(f"{label}: {said}", hanging=2)))


def _folded(label: str) -> str:
    """A long label in several lines, each but the last ending behind an underscore or before an option."""
    lines = [""]
    for part in re.findall(r"[^_ ]+[_ ]?|[_ ]", label):
        if lines[-1] and len(lines[-1]) + len(part) > _LABEL:
            lines.append("")
        lines[-1] += part
    return "\n".join(lines)

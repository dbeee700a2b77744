"""A comparison in the terminal, in 80 columns."""

from __future__ import annotations

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from nemo_lowprec.lines import WIDTH, text_lines
from nemo_lowprec.report.compare.comparison import Comparison
from nemo_lowprec.report.compare.words import HEADINGS, cells, sentences
from nemo_lowprec.report.page.words import folded

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
        table.add_row("\n".join(folded(label, _LABEL)), *others)
    print("\n".join(text_lines(f"Levels beside {reference}: {loss}, gap with its 95 % interval over paired seeds.")))
    Console(width=WIDTH).print(table)
    for label, said, _ in sentences(comparison):
        print("\n".join(text_lines(f"{label}: {said}", hanging=2)))

"""Amax histories as a heatmap for a terminal of 80 columns: a row for each layer, a block character for each step.

Height and colour of a block give log2 of the amax, between the smallest and the largest amax of the operand, so that a
heatmap can be read without colours, too.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from itertools import groupby, pairwise
from typing import NamedTuple

from rich.console import Group
from rich.text import Text

from nemo_lowprec.lines import WIDTH
from nemo_lowprec.report.inspection.amaxes import AmaxHistory

_BLOCKS = "▁▂▃▄▅▆▇█"
# From small to large; each colour can be read on a light and on a dark background.
_COLOURS = ("#3b6fd4", "#2f9fd0", "#28b8a8", "#4fb85a", "#a3b32a", "#d99a1c", "#e06a2b", "#d23b3b")
_ROWS = 16  # of an operand, unless all are wanted
_NAME = 34  # letters of a layer's name
_NUMBER = 9  # columns of an amax
_ORDER = ("input", "weight", "grad_output")


class _Row(NamedTuple):
    """One layer, or layers after each other with the same amaxes: layers that read one tensor, such as q, k and v.

    Attributes:
        name: of the first layer, shortened, with the number of the others.
        layers: the number of layers.
        amaxes: of each layer.
        cells: log2 of the largest amax of the steps of each cell, None where all are zero.
    """

    name: str
    layers: int
    amaxes: Sequence[float]
    cells: list[float | None]


def heatmaps(histories: Sequence[AmaxHistory], all_rows: bool = False) -> Group:
    """One heatmap for each operand, with layers in the model's order.

    Args:
        histories: from ``histories_of``.
        all_rows: whether every layer is shown. Otherwise an operand has up to 16 rows: the rows with amaxes farthest
            from the median of the operand's rows at the same step.
    """
    known = sorted(histories, key=lambda h: _ORDER.index(h.operand))  # stable: the model's order within an operand
    return Group(*(_heatmap(list(of_one), all_rows) for _, of_one in groupby(known, key=lambda h: h.operand)))


def _heatmap(histories: list[AmaxHistory], all_rows: bool) -> Group:
    names = _short_names(histories)
    together = [list(alike) for _, alike in groupby(histories, key=lambda h: h.amaxes)]
    labels = [names[alike[0].layer] + (f" +{len(alike) - 1}" if len(alike) > 1 else "") for alike in together]
    longest = max(map(len, labels))
    steps = max(len(h.amaxes) for h in histories)
    width = min(WIDTH - longest - 2 * _NUMBER - 2, steps)
    rows = [
        _Row(label, len(alike), alike[0].amaxes, _cells(alike[0].amaxes, steps, width))
        for label, alike in zip(labels, together, strict=True)
    ]
    seen = [value for row in rows for value in row.cells if value is not None]
    head = f"Amaxes of {histories[0].operand}: {len(histories)} layers, {steps:,} steps, the newest on the right"
    if not seen:
        return Group(Text(f"{head}; all are zero", style="bold"), "")
    low, high = min(seen), max(seen)
    shown = rows if all_rows else _standing_out(rows)
    lines = [Text(head, style="bold")]
    heading = " " * (longest + 1) + _steps_per_cell(steps, width).ljust(width)
    lines.append(Text(f"{heading} {'largest':>{_NUMBER}}{'newest':>{_NUMBER}}", style="dim"))
    for row in shown:
        line = Text(row.name.ljust(longest + 1))
        for cell in row.cells:
            line.append_text(_block(cell, low, high))
        line.append(f" {max(row.amaxes):>{_NUMBER}.1e}{row.amaxes[-1]:>{_NUMBER}.1e}")
        lines.append(line)
    legend = Text(f"{2**low:.1e} ")
    for level in range(len(_BLOCKS)):
        legend.append(_BLOCKS[level], style=_COLOURS[level])
    legend.append(f" {2**high:.1e}")
    if len(rows) < len(histories):
        legend.append("   +2: and the next 2 layers, with the same amaxes")
    lines += [legend, *_left_out(rows, shown), Text("")]
    return Group(*lines)


def _cells(amaxes: Sequence[float], steps: int, width: int) -> list[float | None]:
    """The last ``steps`` in ``width`` cells; a history that began later has empty cells first."""
    padded = [0.0] * (steps - len(amaxes)) + list(amaxes)
    edges = [round(i * steps / width) for i in range(width + 1)]
    largest = (max(padded[start:end]) for start, end in pairwise(edges))
    return [math.log2(amax) if amax > 0 else None for amax in largest]


def _steps_per_cell(steps: int, width: int) -> str:
    text = f"{steps / width:.3g} steps a column"
    return text if steps > width >= len(text) else ""


def _block(cell: float | None, low: float, high: float) -> Text:
    if cell is None:
        return Text("·", style="dim")
    level = round((cell - low) / (high - low) * (len(_BLOCKS) - 1)) if high > low else len(_BLOCKS) // 2
    return Text(_BLOCKS[level], style=_COLOURS[level])


def _standing_out(rows: list[_Row]) -> list[_Row]:
    """The rows that are farthest from the median of all rows in a cell, in their order."""
    columns = [[cell for cell in column if cell is not None] for column in zip(*(r.cells for r in rows), strict=True)]
    medians = [statistics.median(column) if column else 0.0 for column in columns]

    def distance(row: _Row) -> float:
        pairs = zip(row.cells, medians, strict=True)
        return max((abs(cell - median) for cell, median in pairs if cell is not None), default=0.0)

    chosen = {id(row) for row in sorted(rows, key=distance, reverse=True)[:_ROWS]}
    return [row for row in rows if id(row) in chosen]


def _left_out(rows: list[_Row], shown: list[_Row]) -> Iterator[Text]:
    if len(shown) == len(rows):
        return
    there = {id(row) for row in shown}
    left = [row for row in rows if id(row) not in there]
    count, largest = sum(row.layers for row in left), [max(row.amaxes) for row in left]
    yield Text(f"{count:,} layers nearer to the median are left out (--all shows them), whose largest")
    ends = f"from {min(largest):.1e} to {max(largest):.1e}"
    yield Text(f"amaxes go {ends}, with a median of {statistics.median(largest):.1e}")


def _short_names(histories: list[AmaxHistory]) -> dict[str, str]:
    """Names without the parts that all layers begin with; a long name keeps its end, which tells layers apart."""
    split = [h.layer.split(".") for h in histories]
    shared = 0
    while all(len(parts) > shared + 1 for parts in split) and len({parts[shared] for parts in split}) == 1:
        shared += 1
    short = {h.layer: ".".join(parts[shared:]) for h, parts in zip(histories, split, strict=True)}
    return {layer: name if len(name) <= _NAME else f"…{name[1 - _NAME :]}" for layer, name in short.items()}

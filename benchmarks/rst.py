"""Parts of the documents' tables in reStructuredText."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

__all__ = ["block", "failure", "milliseconds", "origin", "prose", "rst_table", "simple_table", "times"]


def block(takeaway: str, table: str, origins: str = "") -> str:
    """A table between its takeaway, one sentence, and the commands that measured its figures."""
    return "\n\n".join(part for part in (prose(takeaway), table, origins) if part)


def prose(text: str) -> str:
    """A paragraph in lines of at most 120 characters."""
    return textwrap.fill(text, 120, break_long_words=False, break_on_hyphens=False)


def rst_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A reStructuredText list-table. A cell may have several paragraphs, with an empty line between them."""
    lines = [".. list-table::", "   :header-rows: 1", ""]
    for row in (header, *rows):
        for i, cell in enumerate(row):
            first, *others = cell.split("\n")
            lines.append(f"   {'*' if i == 0 else ' '} - {first}")
            lines += [f"       {line}" if line else "" for line in others]
    return "\n".join(lines)


def simple_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A reStructuredText table with one line a row, for cells of one line of which the first is not empty."""
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    rule = "  ".join("=" * width for width in widths)

    def line(row: Sequence[str]) -> str:
        return "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()

    return "\n".join((rule, line(header), rule, *map(line, rows), rule))


def milliseconds(figure: dict, digits: int) -> str:
    """Median (least – most)."""
    median, least, most = (f"{figure[key]:.{digits}f}" for key in ("ms", "ms_min", "ms_max"))
    return f"{median} ({least} – {most})"


def times(figure: dict, other: dict, digits: int = 2) -> str:
    """How many times as fast ``figure`` is as ``other``, of their medians: below 1 it is slower."""
    return f"{other['ms'] / figure['ms']:.{digits}f} ×"


def failure(figure: dict) -> str:
    """What an error was, in a word or two."""
    return "out of memory" if "OutOfMemory" in figure["error"] else figure["error"].split(":")[0]


def origin(origins: list[dict], *also: str, done: str = "Measured") -> str:
    """GPU, date and versions of figures, and the commands that made them; ``also`` names further packages.

    Args:
        done: what the commands did.
    """
    commands: dict[str, list[str]] = {}
    for source in origins:
        versions, names = source["versions"], ("torch", "transformer-engine", "lightning", *also)
        gpu = f"{source['gpus']} × {source['gpu']}" if source["gpus"] > 1 else source["gpu"]
        named = [f"{n} {versions[n]}" for n in names if versions.get(n)]
        where = ", ".join([gpu or "a CPU", source["date"], *named])
        commands.setdefault(where, []).append(source["command"])
    parts = []
    for where, of in commands.items():
        parts += [prose(f"{done} on {where}:"), ".. code-block:: text", "\n".join(f"   {command}" for command in of)]
    return "\n\n".join(parts)

"""Parts of the documents' tables in reStructuredText."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["failure", "milliseconds", "origin", "rst_table"]


def rst_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A reStructuredText list-table."""
    lines = [".. list-table::", "   :header-rows: 1", ""]
    for row in (header, *rows):
        lines += [f"   {'*' if i == 0 else ' '} - {cell}" for i, cell in enumerate(row)]
    return "\n".join(lines)


def milliseconds(figure: dict, digits: int) -> str:
    """Median (least – most)."""
    median, least, most = (f"{figure[key]:.{digits}f}" for key in ("ms", "ms_min", "ms_max"))
    return f"{median} ({least} – {most})"


def failure(figure: dict) -> str:
    """What an error was, in a word or two."""
    return "out of memory" if "OutOfMemory" in figure["error"] else figure["error"].split(":")[0]


def origin(origins: list[dict], *also: str) -> str:
    """Command, GPU, date and versions of figures; ``also`` names further packages."""

    def one(source: dict) -> str:
        versions, names = source["versions"], ("torch", "transformer-engine", "lightning", *also)
        named = ", ".join(f"{n} {versions[n]}" for n in names if versions.get(n))
        gpu = f"{source['gpus']} × {source['gpu']}" if source["gpus"] > 1 else source["gpu"]
        return f"``{source['command']}`` on {gpu or 'a CPU'}, {source['date']}, {named}"

    return ";\n".join(map(one, origins)) + ":"

"""Text in lines of at most 80 characters: prose, pairs of a name and a value, help pages, lists of layer names.

Words, paths and numbers are never broken. A layer name that is longer than a line is broken behind a dot. The last
functions make parts of a message: a few of many names, suggestions for a mistyped name, the text of an exception, and
sizes with their units.
"""

from __future__ import annotations

import difflib
import re
import textwrap
from collections.abc import Iterable, Mapping, Sequence

WIDTH = 80


def text_lines(text: str, indent: int = 0, hanging: int | None = None) -> list[str]:
    """``text`` broken at spaces only; a word longer than a line has a line of its own.

    Args:
        text: one paragraph.
        indent: spaces before the first line.
        hanging: spaces before the other lines; None: ``indent``.
    """
    return textwrap.wrap(
        text,
        WIDTH,
        initial_indent=" " * indent,
        subsequent_indent=" " * (indent if hanging is None else hanging),
        break_long_words=False,
        break_on_hyphens=False,
    )


def pair_lines(pairs: Iterable[tuple[str, str]], indent: int = 2, gap: int = 3) -> list[str]:
    """One line for each name and value, with the values in one column.

    A long value continues on the next lines of the column. A value with a word that is longer than the column (a path)
    starts on a line of its own, so that the word can be copied whole.

    Args:
        pairs: (name, value).
        indent: spaces before the names.
        gap: spaces between the longest name and the values.
    """
    pairs = list(pairs)
    column = indent + max((len(name) for name, _ in pairs), default=0) + gap
    lines = []
    for name, value in pairs:
        start = " " * indent + name
        if max(map(len, value.split()), default=0) > WIDTH - column:
            lines += [start, *text_lines(value, indent + 2)]
        else:
            wrapped = text_lines(value, column) or [""]
            lines += [start + wrapped[0][len(start) :], *wrapped[1:]]
    return lines


def help_page(usage: str, about: str, tables: Mapping[str, Mapping[str, str]], examples: Iterable[str]) -> str:
    """The text of a command's ``--help``.

    Args:
        usage: the command line.
        about: one paragraph.
        tables: for each title the words of the command line and their meanings.
        examples: command lines.
    """
    lines = [f"usage: {usage}", "", *text_lines(about)]
    for title, table in tables.items():
        lines += ["", f"{title}:", *pair_lines(table.items(), gap=2)]
    return "\n".join([*lines, "", "examples:", *(f"  {example}" for example in examples)])


def name_lines(names: Sequence[str], indent: int) -> list[str]:
    """Names of layers with commas between them, in lines indented by ``indent`` spaces.

    A line ends behind a comma, or behind a dot of a name that is longer than a line.
    """
    room, lines = WIDTH - indent, [""]
    for index, name in enumerate(names):
        word = name + "," * (index < len(names) - 1)
        joined = f"{lines[-1]} {word}".lstrip()
        if len(joined) <= room:
            lines[-1] = joined
            continue
        if lines[-1]:
            lines.append("")
        for part in re.split(r"(?<=\.)", word):
            if lines[-1] and len(lines[-1]) + len(part) > room:
                lines.append("")
            lines[-1] += part
    return [" " * indent + line for line in lines if line]


def abbreviate(names: Iterable[str]) -> str:
    """The first three names, with commas between them, and the number of the others."""
    names = list(names)
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def one_line(error: BaseException) -> str:
    """The text of another library's exception in one line, with the class of the exception where the text needs it."""
    text = " ".join(line.strip() for line in str(error).splitlines() if line.strip())
    told = isinstance(error, ValueError | TypeError) or type(error).__name__ == "MisconfigurationException"
    return text if told and text else f"{type(error).__name__}: {text}"


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """A blank and the question "Did you mean ...?" about the most similar known name; empty where none is similar."""
    found = difflib.get_close_matches(name, known, 1)
    return f" Did you mean {found[0]!r}?" if found else ""


def nearest(name: str, known: Iterable[str]) -> str:
    """``did_you_mean``, or a sentence that lists the known names (without a leading ``_``) where no name is similar."""
    known = [k for k in known if not k.startswith("_")]
    return did_you_mean(name, known) or f" There are: {', '.join(known) or 'none'}."


def count_text(number: int) -> str:
    """A number of elements in millions or billions."""
    return f"{number / 1e9:,.2f} B" if number >= 1e9 else f"{number / 1e6:,.2f} M"


def bytes_text(size: int) -> str:
    """Bytes in three digits with their unit; a dash for 0."""
    if size < 1000:
        return f"{size} B" if size else "–"
    value, units = size / 1024, ["KiB", "MiB", "GiB", "TiB"]
    while value >= 999.5 and len(units) > 1:
        value, units = value / 1024, units[1:]
    digits = 0 if value >= 99.95 else 1 if value >= 9.995 else 2
    return f"{value:,.{digits}f} {units[0]}"


def signed_bytes_text(size: int) -> str:
    """``bytes_text`` of a number that may be negative."""
    return bytes_text(size) if size >= 0 else f"-{bytes_text(-size)}"

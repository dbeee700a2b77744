"""What a mistyped name may have meant."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

__all__ = ["did_you_mean", "nearest"]


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """A blank and a question that names the known name nearest to ``name``; empty where no name is near."""
    found = difflib.get_close_matches(name, known, 1)
    return f" Did you mean {found[0]!r}?" if found else ""


def nearest(name: str, known: Iterable[str]) -> str:
    """``did_you_mean``, or where that is empty a sentence that lists all known names without a leading ``_``."""
    known = [k for k in known if not k.startswith("_")]
    return did_you_mean(name, known) or f" There are: {', '.join(known) or 'none'}."

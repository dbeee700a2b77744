"""Suggestions for mistyped names."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

__all__ = ["did_you_mean", "nearest"]


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """A blank and the question "Did you mean ...?" about the most similar known name; empty where none is similar."""
    found = difflib.get_close_matches(name, known, 1)
    return f" Did you mean {found[0]!r}?" if found else ""


def nearest(name: str, known: Iterable[str]) -> str:
    """``did_you_mean``, or a sentence that lists the known names (without a leading ``_``) where no name is similar."""
    known = [k for k in known if not k.startswith("_")]
    return did_you_mean(name, known) or f" There are: {', '.join(known) or 'none'}."

"""Words for messages."""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["first_of"]


def first_of(names: Iterable[str]) -> str:
    """The first names of many."""
    names = list(names)
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")

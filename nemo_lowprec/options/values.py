"""Checks and defaults that the dataclasses of arguments share."""

from __future__ import annotations

from dataclasses import fields
from typing import Any


class Arguments:
    """Base of the frozen dataclasses that hold the arguments of one column."""

    @classmethod
    def arguments(cls) -> dict[str, Any]:
        """Argument names and defaults."""
        return {f.name: f.default for f in fields(cls)}  # type: ignore[arg-type]


def check_flag(name: str, value: Any) -> None:
    """Raise ValueError unless ``value`` is a boolean."""
    if not isinstance(value, bool):
        raise ValueError(f"{name}={value!r} must be True or False.")


def is_integer(value: Any, low: int, high: float = float("inf")) -> bool:
    """Whether ``value`` is an integer, and no boolean, from ``low`` to ``high``."""
    return isinstance(value, int) and not isinstance(value, bool) and low <= value <= high

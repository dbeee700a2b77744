"""The code of a module's forward, below the decorators that a library puts on it."""

from __future__ import annotations

from types import CellType, FunctionType
from typing import Any


def innermost(function: Any) -> FunctionType | None:
    """The function that ``function`` calls below its decorators, or ``function`` itself where it has none.

    A decorator is known by ``functools.wraps`` and by its closure, which holds the function that it calls. None for
    anything else.
    """
    while isinstance(function, FunctionType) and hasattr(function, "__wrapped__"):
        function = function.__wrapped__ if _cell(function) is not None else None
    return function if isinstance(function, FunctionType) else None


def with_globals(function: FunctionType, names: dict[str, Any]) -> FunctionType:
    """A copy of ``function``, decorators included, in which the innermost function finds its globals in ``names``."""
    wrapped = getattr(function, "__wrapped__", None)
    if wrapped is None:
        return _copied(function, names, function.__closure__)
    held, inner = _cell(function), with_globals(wrapped, names)
    closure = tuple(CellType(inner) if cell is held else cell for cell in function.__closure__ or ())
    copy = _copied(function, function.__globals__, closure)
    copy.__dict__.update({**function.__dict__, "__wrapped__": inner})
    return copy


def _copied(function: FunctionType, names: dict[str, Any], closure: tuple[CellType, ...] | None) -> FunctionType:
    copy = FunctionType(function.__code__, names, function.__name__, function.__defaults__, closure)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


def _cell(function: FunctionType) -> CellType | None:
    """The cell of the closure that holds what ``function`` wraps; None where none does."""
    return next((cell for cell in function.__closure__ or () if _holds(cell, function.__wrapped__)), None)  # type: ignore[attr-defined]


def _holds(cell: CellType, value: Any) -> bool:
    try:
        return cell.cell_contents is value
    except ValueError:  # an empty cell
        return False

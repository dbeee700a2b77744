"""What a parameter or its gradient calls, without keeping the called object alive."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakMethod

__all__ = ["weakly"]


def weakly(method: Callable[..., Any]) -> Callable[..., Any]:
    """A function that calls a bound method for as long as its object lives, and returns None afterwards.

    For hooks of parameters and for attributes of gradients: torch shows neither to Python's garbage collector, so that
    a parameter which the method's object holds would never be freed.
    """
    held = WeakMethod(method)

    def call(*args: Any) -> Any:
        found = held()
        return None if found is None else found(*args)

    return call

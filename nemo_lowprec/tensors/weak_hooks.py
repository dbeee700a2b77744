"""Hooks of parameters and gradients that do not keep the hook's object alive."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakMethod


def weakly(method: Callable[..., Any]) -> Callable[..., Any]:
    """A function that calls a bound method while the method's object lives, and returns None afterwards.

    torch does not show post-accumulate hooks and attributes of gradients to Python's garbage collector. With the bound
    method itself as a hook, a parameter that the method's object holds would never be freed.
    """
    held = WeakMethod(method)

    def call(*args: Any) -> Any:
        found = held()
        return None if found is None else found(*args)

    return call

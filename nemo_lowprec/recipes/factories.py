"""nemo_run's ``factory``, for functions that say which arguments there are when one is mistyped."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

import nemo_run as run

from nemo_lowprec.nearest import nearest

__all__ = ["factory"]

F = TypeVar("F", bound=Callable[..., Any])


def factory(target: Any, name: str | None = None) -> Callable[[F], F]:
    """Decorate a function that returns a config: nemo_run's command line knows it.

    Args:
        target: class or function whose configs it returns.
        name: on the command line; None: the function's.
    """

    def known(function: F) -> F:
        parameters = inspect.signature(function).parameters

        @wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            for argument in kwargs:
                if argument not in parameters:
                    raise TypeError(
                        f"{name or function.__name__} has no argument {argument!r}.{nearest(argument, parameters)}"
                    )
            return function(*args, **kwargs)

        return run.cli.factory(call, name=name, target=target)  # type: ignore[no-any-return]

    return known

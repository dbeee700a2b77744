"""Every level of the chart as a nemo_run factory of its name."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import nemo_run as run
from lightning.pytorch.plugins.precision import Precision

from nemo_lowprec.plugins import LEVELS, LowPrecision
from nemo_lowprec.recipes.parsers import register_parsers
from nemo_lowprec.run_arguments import check_level_argument

__all__ = ["FACTORIES"]


def _factory(name: str) -> Callable[..., run.Config[LowPrecision]]:
    """A function with the arguments of the level ``name`` that returns its config, known to the command line."""
    level = LEVELS[name]

    def build(**arguments: Any) -> run.Config[LowPrecision]:
        for argument in arguments:
            check_level_argument(name, argument)
        return run.Config(level, **arguments)

    build.__name__ = build.__qualname__ = name
    build.__module__ = __name__
    build.__doc__ = level.__doc__
    build.__signature__ = inspect.signature(level).replace(  # type: ignore[attr-defined]
        return_annotation=run.Config[LowPrecision]
    )
    # nemo_run looks a factory up under the types in an argument's annotation, and not under their subclasses. The
    # Trainer's `plugins` says Precision; a function of the user's own may say LowPrecision.
    run.cli.factory(build, target=LowPrecision)
    return run.cli.factory(build, target=Precision)  # type: ignore[no-any-return]


register_parsers()
FACTORIES: dict[str, Callable[..., run.Config[LowPrecision]]] = {name: _factory(name) for name in LEVELS}
globals().update(FACTORIES)

"""Prints a recipe as settings of the command line."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fiddle as fdl
from nemo_run.api import dryrun_fn


def show_recipe(recipe: fdl.Buildable, executor: Any = None) -> None:
    """Print the values that a recipe sets, once for all processes of a machine.

    nemo_run's own function prints the recipe under the heading "Dry run", and prints the executor.

    Args:
        recipe: the recipe with all overrides.
        executor: nemo_run's executor of the recipe; None: this process.
    """
    if executor is not None:
        dryrun_fn(recipe, executor)
    elif os.environ.get("LOCAL_RANK", "0") == "0":
        print("\n".join(_lines("", recipe)), flush=True)


def _lines(path: str, value: Any) -> Iterator[str]:
    if isinstance(value, fdl.Buildable):
        if path:
            yield f"{path} = {getattr(fdl.get_callable(value), '__name__', fdl.get_callable(value))}"
        for name, argument in fdl.ordered_arguments(value).items():
            yield from _lines(f"{path}.{name}" if path else name, argument)
    elif isinstance(value, list) and any(isinstance(entry, fdl.Buildable) for entry in value):
        for i, entry in enumerate(value):
            yield from _lines(f"{path}[{i}]", entry)
    else:
        yield f"{path} = {value if isinstance(value, str | Path) and str(value) else repr(value)}"

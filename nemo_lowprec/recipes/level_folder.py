"""A Trainer that writes to a folder with the name of its level."""

from __future__ import annotations

import inspect
from functools import partial, wraps
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.plugins.precision import Precision

from nemo_lowprec.arguments import check_arguments, checked
from nemo_lowprec.train import level_name

_make = checked(Trainer.__init__)


class CheckedTrainer(Trainer):
    """Lightning's Trainer with the folder ``default_root_dir/LEVEL``; a bad argument is a ValueError at once.

    A user may replace the level of a recipe until the Trainer is made. So callbacks and loggers that write to the
    folder are given as partials (``run.Partial`` in a recipe). The Trainer calls a callback's partial with ``dirpath``
    LEVEL/checkpoints and a logger's partial with ``save_dir`` LEVEL, unless the partial has that argument. Other
    callbacks and loggers are used as they are.
    """

    @wraps(Trainer.__init__)  # type: ignore[misc]
    def __init__(self, **arguments: Any) -> None:
        check_arguments(Trainer.__init__, {"default_root_dir": arguments.get("default_root_dir")})
        folder = f"{arguments.get('default_root_dir') or '.'}/{_level(**arguments)}"
        for name, place in (("callbacks", {"dirpath": f"{folder}/checkpoints"}), ("logger", {"save_dir": folder})):
            given = arguments.get(name)
            if isinstance(given, list):
                arguments[name] = [_made(entry, place) for entry in given]
            elif given is not None:
                arguments[name] = _made(given, place)
        _make(self, **arguments | {"default_root_dir": folder})


def _level(plugins: Any = None, precision: Any = None, **_: Any) -> str:
    """The name of the level among ``plugins``, or else of Lightning's ``precision``."""
    for plugin in plugins if isinstance(plugins, list) else [plugins]:
        if isinstance(plugin, Precision):
            return level_name(plugin)
    return str(precision or "32-true")


def _made(entry: Any, place: dict[str, str]) -> Any:
    if not isinstance(entry, partial):
        return entry
    parameters = inspect.signature(entry).parameters
    return entry(**{name: path for name, path in place.items() if name in parameters and name not in entry.keywords})

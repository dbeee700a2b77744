"""A Trainer whose run writes to a folder that its level names."""

from __future__ import annotations

import inspect
from functools import partial, wraps
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.plugins.precision import Precision

from nemo_lowprec.arguments import check_arguments, checked

__all__ = ["CheckedTrainer"]

_make = checked(Trainer.__init__)


class CheckedTrainer(Trainer):
    """Lightning's Trainer; its folder is ``default_root_dir/LEVEL``, and a bad argument a ValueError at once.

    The level of a recipe may be replaced until the Trainer is made. So callbacks and loggers that write to the folder
    come as partials (``run.Partial`` of a recipe), and are made with the Trainer: a callback with ``dirpath``
    LEVEL/checkpoints, a logger with ``save_dir`` LEVEL, unless they have one. Others are taken as they are.
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
    """The level's name, or Lightning's of another precision."""
    for plugin in plugins if isinstance(plugins, list) else [plugins]:
        if isinstance(plugin, Precision):
            return str(getattr(getattr(plugin, "level", None), "name", plugin.precision))
    return str(precision or "32-true")


def _made(entry: Any, place: dict[str, str]) -> Any:
    if not isinstance(entry, partial):
        return entry
    parameters = inspect.signature(entry).parameters
    return entry(**{name: path for name, path in place.items() if name in parameters and name not in entry.keywords})

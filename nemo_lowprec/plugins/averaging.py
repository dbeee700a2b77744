"""Lightning's callbacks that average weights read and write the exact weights."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch import callbacks
from torch import nn

from nemo_lowprec.plugins.replaced import replace_attribute
from nemo_lowprec.weights.averaging import ExactWeights

# Each callback's name, as NeMo's Lightning 2.4 has the first only; and its methods that read or write parameters.
_METHODS = {
    "StochasticWeightAveraging": ("update_parameters", "transfer_weights"),
    "WeightAveraging": ("_swap_models", "_copy_average_to_current"),
}
AVERAGING = tuple(vars(callbacks)[name] for name in _METHODS if name in vars(callbacks))


def average_exactly(trainer: pl.Trainer, module: nn.Module, undo: ExitStack) -> None:
    """Give the averaging callbacks of ``trainer`` the exact weights of ``module`` until ``undo`` is closed."""
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        for kind, names in _METHODS.items():
            if isinstance(callback, vars(callbacks).get(kind, ())):
                for name in names:
                    method = _with_exact(getattr(type(callback), name), callback, name, module)
                    replace_attribute(undo, callback, name, method)


def _with_exact(function: Callable[..., Any], callback: Any, name: str, module: nn.Module) -> Any:
    static = isinstance(_find(type(callback), name), staticmethod)
    averages: list[Any] = []

    def method(*args: Any) -> Any:
        exact = ExactWeights(module)
        given = [exact if arg is module else arg for arg in args]
        result = function(*given) if static else function(callback, *given)
        exact.refresh()
        return result

    def swap(pl_module: nn.Module) -> None:
        # The model holds the averages in the level's formats during a validation; the callback gets them back exactly.
        params = list(callback._average_model.module.parameters())
        come_back, averages[:] = averages[:], [] if averages else [param.detach().clone() for param in params]
        method(pl_module)
        for param, average in zip(params, come_back, strict=False):
            param.data.copy_(average)

    return swap if name == "_swap_models" else method


def _find(cls: type, name: str) -> Any:
    return next(vars(base)[name] for base in cls.__mro__ if name in vars(base))

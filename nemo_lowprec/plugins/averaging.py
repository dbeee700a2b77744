"""Lightning's callbacks that average weights read and write the exact ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch import callbacks
from torch import nn

from nemo_lowprec.weights.averaging import ExactWeights

__all__ = ["AVERAGING", "average_as_before", "average_exactly"]

# By name, as NeMo's Lightning 2.4 has the first only. Each with its methods that read or write a model's parameters.
_METHODS = {
    "StochasticWeightAveraging": ("update_parameters", "transfer_weights"),
    "WeightAveraging": ("_swap_models", "_copy_average_to_current"),
}
AVERAGING = tuple(vars(callbacks)[name] for name in _METHODS if name in vars(callbacks))


def average_exactly(trainer: pl.Trainer, module: nn.Module) -> None:
    """Give the averaging callbacks of ``trainer`` the exact weights of ``module``."""
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        for kind, names in _METHODS.items():
            if isinstance(callback, vars(callbacks).get(kind, ())):
                for name in names:
                    callback.__dict__[name] = _with_exact(getattr(type(callback), name), callback, name, module)


def average_as_before(trainer: pl.Trainer) -> None:
    """Undo ``average_exactly``."""
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        for names in _METHODS.values():
            for name in names:
                if isinstance(callback, AVERAGING):
                    callback.__dict__.pop(name, None)


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
        # The model holds averages in the level's formats while it is validated; they come back as they went.
        params = list(callback._average_model.module.parameters())
        come_back, averages[:] = averages[:], [] if averages else [param.detach().clone() for param in params]
        method(pl_module)
        for param, average in zip(params, come_back, strict=False):
            param.data.copy_(average)

    return swap if name == "_swap_models" else method


def _find(cls: type, name: str) -> Any:
    return next(vars(base)[name] for base in cls.__mro__ if name in vars(base))

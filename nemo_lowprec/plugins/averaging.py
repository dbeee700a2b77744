"""Lightning's callbacks that average weights read and write the exact weights."""

from __future__ import annotations

from contextlib import ExitStack
from itertools import product
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch import callbacks
from torch import nn

from nemo_lowprec.compat.lightning import AVERAGE_METHOD, SWAP_METHOD, averaged_model
from nemo_lowprec.engine import Engine
from nemo_lowprec.plugins.replaced import replace_attribute
from nemo_lowprec.weights.averaging import ExactWeights

# The methods of each callback that read or write parameters. By name, as Lightning 2.4 (NeMo's) has the first only.
_METHODS = {
    "StochasticWeightAveraging": ("update_parameters", "transfer_weights"),
    "WeightAveraging": (SWAP_METHOD, AVERAGE_METHOD),
}


def average_exactly(trainer: pl.Trainer, module: nn.Module, engine: Engine, undo: ExitStack) -> None:
    """Give the averaging callbacks of ``trainer`` the exact weights of ``module`` until ``undo`` is closed.

    Raises:
        ValueError: ``engine`` shards the parameters.
    """
    every: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
    for callback, (kind, names) in product(every, _METHODS.items()):
        if not isinstance(callback, vars(callbacks).get(kind, ())):
            continue
        if engine.sharding is not None:
            raise ValueError(
                f"{type(callback).__name__} averages whole parameters, and with lowprec_sharded each process has a "
                f"part of those of {engine.level.name}. Use strategy='lowprec_ddp', or leave the callback out."
            )
        for name in names:
            replace_attribute(undo, callback, name, _with_exact(callback, name, module))


def _with_exact(callback: Any, name: str, module: nn.Module) -> Any:
    function = getattr(callback, name)
    averages: list[Any] = []

    def method(*args: Any) -> Any:
        exact = ExactWeights(module)
        result = function(*(exact if arg is module else arg for arg in args))
        exact.refresh()
        return result

    def swap(pl_module: nn.Module) -> None:
        # During a validation the model holds the averages in the level's formats; the callback gets exact copies back.
        params = list(averaged_model(callback).parameters())
        come_back, averages[:] = averages[:], [] if averages else [param.detach().clone() for param in params]
        method(pl_module)
        for param, average in zip(params, come_back, strict=False):
            param.data.copy_(average)

    return swap if name == SWAP_METHOD else method

"""Calls a model with an example batch, as training would, without a Trainer."""

from __future__ import annotations

import warnings
from typing import Any

from torch import Tensor


def outputs_of(module: Any, batch: Any) -> Any:
    """Run a forward pass of ``batch``; the loss, or the outputs of a module that computes no loss.

    Args:
        module: a language model of this package, a LightningModule, or any other module.
        batch: the argument of ``training_step``. Of a module without a ``training_step``: the argument of its forward
            pass, or a tuple or a dict of arguments.
    """
    if hasattr(module, "_loss_sum"):
        total, count = module._loss_sum(batch)
        return total / count.clamp(min=1)
    if hasattr(module, "training_step"):
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*self.log.*")  # which has no Trainer to go to
            return module.training_step(batch, 0)
    return forward_of(module, batch)


def forward_of(module: Any, arguments: Any) -> Any:
    """The result of the forward pass for its one argument, or for a tuple or a dict of arguments."""
    if isinstance(arguments, dict):
        return module(**arguments)
    return module(*arguments) if isinstance(arguments, (tuple, list)) else module(arguments)


def loss_of(module: Any, batch: Any) -> Tensor:
    """The loss of ``batch``, a scalar with a gradient.

    Args:
        module, batch: as for ``outputs_of``.

    Raises:
        ValueError: the forward pass gives no loss.
    """
    found = outputs_of(module, batch)
    loss = found.get("loss") if isinstance(found, dict) else getattr(found, "loss", found)
    if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
        raise ValueError(
            f"A forward pass of {type(module).__name__} gives no loss: advise needs a LightningModule, a model of "
            "transformers with labels in the batch, or a module that returns a scalar with a gradient."
        )
    return loss.reshape(())

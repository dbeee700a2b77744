"""Gradients of the last step, which Lightning zeroes only after the next forward pass.

The CUDA graph of a whole model overwrites the memory of these gradients in the forward pass, and would copy them first.
"""

from __future__ import annotations

import lightning.pytorch as pl
from lightning.pytorch.utilities.model_helpers import is_overridden

from nemo_lowprec.compat.lightning import is_first_of_step, trainer_of


def zero_before_forward(module: pl.LightningModule) -> None:
    """Zero the gradients that Lightning is to zero after this forward pass, unless a hook may read them by then.

    A ``training_step`` that reads ``param.grad`` finds None.
    """
    trainer = trainer_of(module)
    if trainer is None or not module.automatic_optimization or not is_first_of_step(trainer):
        return
    hooks = "on_before_zero_grad", "optimizer_zero_grad"
    if not any(is_overridden(hook, module) for hook in hooks) and not any(
        is_overridden(hooks[0], callback) for callback in trainer.callbacks
    ):
        for optimizer in trainer.optimizers:
            optimizer.zero_grad()

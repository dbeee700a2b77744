"""What the Trainer's loggers are told of a level: its name, the loss scale, skipped steps, and the gradient norm."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.data import AttributeDict
from torch import Tensor
from torch.optim import Optimizer

__all__ = ["LevelLog"]

_OWN = ("_hparams_initial", "_log_hyperparams")


class LevelLog:
    """Writes to the loggers of a Trainer, every ``log_every_n_steps``.

    Hyperparameters: ``precision_level``, and ``precision_options`` where there are any. Metrics: ``grad_norm``, the L2
    norm of the true gradients of all processes before clipping (``grad_norm/0``, ... with several optimizers);
    ``loss_scale`` of this step, at levels that have one; ``skipped_steps``, how many steps were skipped so far because
    a gradient was not finite.

    Attributes:
        skipped_steps: counted from the start of the training, those before a resume included.
    """

    def __init__(self) -> None:
        self.skipped_steps = 0
        self._before: dict[str, Any] | None = None

    def begin(self, module: pl.LightningModule, level: str, options: str) -> None:
        """Name the level among the hyperparameters that Lightning hands to the loggers after this."""
        self.end(module)
        self._before = {name: vars(module)[name] for name in _OWN if name in vars(module)}
        told = {"precision_level": level} | ({"precision_options": options} if options else {})
        module._hparams_initial = AttributeDict({**module.hparams_initial, **told})  # type: ignore[assignment]
        module._log_hyperparams = True

    def end(self, module: pl.LightningModule) -> None:
        """Leave the module's own hyperparameters as they were."""
        if self._before is None:
            return
        for name in _OWN:
            vars(module).pop(name, None)
        vars(module).update(self._before)
        self._before = None

    def is_due(self, module: pl.LightningModule) -> bool:
        """Whether Lightning writes what is logged in this step: the same on all processes."""
        trainer = module._trainer
        # Without a hook at work, a step by hand, the module cannot log.
        if trainer is None or module._current_fx_name is None or trainer.barebones:
            return False
        every: int = trainer.log_every_n_steps  # type: ignore[attr-defined]
        return every > 0 and (trainer.fit_loop.epoch_loop._batches_that_stepped + 1) % every == 0

    def write(
        self, module: pl.LightningModule, optimizer: Optimizer, norm: Tensor | None, loss_scale: float | None
    ) -> None:
        """Write one step that is due.

        Args:
            optimizer: has taken the step.
            norm: L2 norm of the gradients of ``optimizer``, FP32 scalar; None where it is unknown.
            loss_scale: factor of these gradients in the backward pass; None at a level without a loss scale.
        """
        trainer: Any = module.trainer
        several = len(trainer.optimizers) > 1
        suffix = f"/{[id(o) for o in trainer.optimizers].index(id(optimizer))}" if several else ""
        metrics: dict[str, Any] = {f"grad_norm{suffix}": norm, "loss_scale": loss_scale}
        metrics["skipped_steps"] = self.skipped_steps
        for name, value in metrics.items():
            if value is not None:
                # Lightning would copy a number to the GPU, and wait for the copy.
                value = value if isinstance(value, Tensor) else torch.full((), float(value), device=module.device)
                module.log(name, value, on_step=True, on_epoch=False)

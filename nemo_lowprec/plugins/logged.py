"""Logs the level's name, the loss scale, the number of skipped steps and the gradient norm to the Trainer's loggers."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.data import AttributeDict
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor
from torch.optim import Optimizer

from nemo_lowprec.compat import lightning as compat
from nemo_lowprec.engine import Step
from nemo_lowprec.observers import Observer
from nemo_lowprec.plugins.replaced import replace_attribute

SKIPPED = (
    "A gradient is not finite: the optimizer's step is skipped, and a step-wise learning-rate scheduler's with it. "
    "This is said once; the optimizers whose last step was skipped are in trainer.{}.skipped."
)


class LevelLog(Observer):
    """Writes to the loggers of a Trainer, every ``log_every_n_steps``.

    Hyperparameters: ``precision_level``, and ``precision_options`` if the user has given options. Metrics:
    ``grad_norm``, the L2 norm of the true gradients before clipping (``grad_norm/0``, ... with several optimizers);
    ``loss_scale`` of this step, at levels with a loss scale; ``skipped_steps``, the number of steps so far that were
    skipped because a gradient was not finite.

    Attributes:
        skipped_steps: skipped steps since the start of the training; a checkpoint holds the number.
    """

    def __init__(self) -> None:
        self.skipped_steps = 0
        self._step: Step
        self._place: str

    def begin(
        self, module: pl.LightningModule, step: Step, place: str, level: str, options: str, undo: ExitStack
    ) -> None:
        """Count the steps that ``step`` skips, and add the level to the hyperparameters, until ``undo`` is closed.

        Args:
            module: the Trainer's LightningModule, whose hyperparameters Lightning logs next.
            step: runs the optimizers' steps.
            place: where ``step`` is in the Trainer.
        """
        self._step, self._place = step, place
        undo.enter_context(step.observers.watched_by(self))
        told = {"precision_level": level} | ({"precision_options": options} if options else {})
        replace_attribute(undo, module, compat.HPARAMS_ATTRIBUTE, AttributeDict({**module.hparams_initial, **told}))
        replace_attribute(undo, module, compat.LOGS_HPARAMS_ATTRIBUTE, True)

    def is_due(self, module: pl.LightningModule) -> bool:
        """Whether Lightning writes metrics in this step; the same on all processes."""
        trainer = compat.trainer_of(module)
        # Outside of Lightning's hooks, in a step by hand, the module cannot log.
        if trainer is None or not compat.is_in_hook(module) or trainer.barebones:
            return False
        every: int = trainer.log_every_n_steps  # type: ignore[attr-defined]
        return every > 0 and (compat.steps_of_epoch(trainer) + 1) % every == 0

    def step(self, optimizer: Optimizer, skipped: bool) -> None:
        self.skipped_steps += skipped
        scale = self._step.loss_scale
        if skipped and (scale is None or not scale.dynamic):  # a dynamic scale falls until the gradients are finite
            rank_zero_warn(SKIPPED.format(self._place))

    def after_step(self, module: pl.LightningModule, optimizer: Optimizer, norm: Tensor | None) -> None:
        """Log the metrics of a step where they are due; the host then waits for the step.

        Args:
            module: the Trainer's LightningModule.
            optimizer: has taken the step, or skipped it.
            norm: L2 norm of the gradients of ``optimizer``, FP32 scalar; None where it is unknown.
        """
        if not self.is_due(module):
            return
        self._step.settle()
        trainer: Any = module.trainer
        several = len(trainer.optimizers) > 1
        suffix = f"/{trainer.optimizers.index(optimizer)}" if several else ""
        loss_scale = self._step.loss_scale
        scale = None if loss_scale is None else loss_scale.used
        metrics = {f"grad_norm{suffix}": norm, "loss_scale": scale, "skipped_steps": self.skipped_steps}
        for name, value in metrics.items():
            if value is not None:
                # Lightning would copy a number to the GPU, and wait for the copy.
                value = (
                    value
                    if isinstance(value, Tensor)
                    else torch.full((), float(value), device=module.device, dtype=torch.float32)
                )
                module.log(name, value, on_step=True, on_epoch=False)

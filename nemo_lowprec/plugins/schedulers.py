"""Holds back step-wise learning-rate schedulers when the optimizer's step was skipped for non-finite gradients."""

from __future__ import annotations

from collections.abc import Container
from contextlib import ExitStack
from typing import Any

import lightning.pytorch as pl
from torch.optim import Optimizer

from nemo_lowprec.plugins.replaced import replace_attribute


def hold_back_skipped(
    module: pl.LightningModule, skipped: Container[Optimizer], configs: list[Any], undo: ExitStack
) -> None:
    """Wrap ``module.lr_scheduler_step`` until ``undo`` is closed.

    A wrapped ``scheduler.step`` would be saved in the scheduler's state_dict.

    Args:
        module: the Trainer's LightningModule.
        skipped: the optimizers whose last step was skipped; read at each step.
        configs: Lightning's ``LRSchedulerConfig``s.
        undo: gives the module its own method back when it is closed.
    """
    stepwise = {id(config.scheduler) for config in configs if config.interval == "step"}
    original = module.lr_scheduler_step

    def lr_scheduler_step(scheduler: Any, metric: Any) -> None:
        if id(scheduler) not in stepwise or scheduler.optimizer not in skipped:
            original(scheduler, metric)

    replace_attribute(undo, module, "lr_scheduler_step", lr_scheduler_step)

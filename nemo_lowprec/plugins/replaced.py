"""Sets attributes of callbacks, modules and parts of the Trainer for the duration of one run."""

from __future__ import annotations

from collections.abc import Container
from contextlib import ExitStack
from typing import Any

import lightning.pytorch as pl
from torch.optim import Optimizer


def replace_attribute(undo: ExitStack, owner: Any, name: str, value: Any) -> None:
    """Set an attribute of ``owner``; closing ``undo`` restores the attribute that the instance had, or deletes it."""
    held = vars(owner)
    if name in held:
        undo.callback(held.__setitem__, name, held[name])
    else:
        undo.callback(held.pop, name, None)
    held[name] = value


def hold_back_schedulers(
    module: pl.LightningModule, skipped: Container[Optimizer], configs: list[Any], undo: ExitStack
) -> None:
    """Make ``module.lr_scheduler_step`` leave out step-wise schedulers of optimizers whose last step was skipped.

    A wrapped ``scheduler.step`` would be saved in the scheduler's state_dict. ``skipped``, the optimizers whose last
    step was skipped, is read at each step; ``configs`` are Lightning's ``LRSchedulerConfig``s.
    """
    stepwise = {id(config.scheduler) for config in configs if config.interval == "step"}
    original = module.lr_scheduler_step

    def lr_scheduler_step(scheduler: Any, metric: Any) -> None:
        if id(scheduler) not in stepwise or scheduler.optimizer not in skipped:
            original(scheduler, metric)

    replace_attribute(undo, module, "lr_scheduler_step", lr_scheduler_step)

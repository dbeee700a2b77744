"""A step that was skipped for gradients that are not finite holds back step-wise learning-rate schedulers too."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl

from nemo_lowprec.engine import Step

__all__ = ["hold_back_skipped", "release_schedulers"]


def hold_back_skipped(module: pl.LightningModule, step: Step, configs: list[Any]) -> None:
    """Wrap ``module.lr_scheduler_step``: patching ``scheduler.step`` would end up in the scheduler's state_dict."""
    stepwise = {id(config.scheduler) for config in configs if config.interval == "step"}
    original = type(module).lr_scheduler_step

    def lr_scheduler_step(scheduler: Any, metric: Any) -> None:
        if id(scheduler) in stepwise and scheduler.optimizer in step.skipped:
            return
        original(module, scheduler, metric)

    module.__dict__["lr_scheduler_step"] = lr_scheduler_step


def release_schedulers(module: pl.LightningModule) -> None:
    """Take the wrapper away."""
    module.__dict__.pop("lr_scheduler_step", None)

"""Step-wise learning-rate schedulers: where an optimizer's step is skipped, the step of its schedulers is, too."""

from __future__ import annotations

from contextlib import ExitStack
from copy import deepcopy
from typing import Any

import lightning.pytorch as pl
from torch import Tensor
from torch.optim import Optimizer

from nemo_lowprec.engine import Step
from nemo_lowprec.observers import Observer
from nemo_lowprec.plugins.replaced import replace_attribute


class StepwiseSchedulers(Observer):
    """Makes ``module.lr_scheduler_step`` leave out step-wise schedulers of optimizers whose last step was skipped.

    Lightning steps a scheduler right after its optimizer. Where the host does not know yet whether the optimizer's step
    was skipped, the scheduler steps, and gets its earlier state back once the host learns of a skipped step. A wrapped
    ``scheduler.step`` would be saved in the scheduler's state_dict.

    Args:
        module: the Trainer's LightningModule.
        step: runs the optimizers' steps.
        configs: Lightning's ``LRSchedulerConfig``s.
        undo: gives the module its method back when it is closed.
    """

    def __init__(self, module: pl.LightningModule, step: Step, configs: list[Any], undo: ExitStack) -> None:
        self._step, self._original = step, module.lr_scheduler_step
        self._stepwise = {id(config.scheduler) for config in configs if config.interval == "step"}
        self._ahead: list[tuple[Any, Any, list[dict[str, Any]]]] = []  # schedulers, and what they were before
        replace_attribute(undo, module, "lr_scheduler_step", self._lr_scheduler_step)
        undo.enter_context(step.observers.watched_by(self))

    def _lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        if id(scheduler) in self._stepwise:
            if self._step.is_open(scheduler.optimizer):
                self._ahead.append((scheduler, deepcopy(scheduler.state_dict()), _settings(scheduler.optimizer)))
            elif scheduler.optimizer in self._step.skipped:
                return
        self._original(scheduler, metric)

    def step(self, optimizer: Optimizer, skipped: bool) -> None:
        ahead, self._ahead = self._ahead, []
        for scheduler, state, settings in reversed(ahead) if skipped else ():
            scheduler.load_state_dict(state)
            for group, before in zip(scheduler.optimizer.param_groups, settings, strict=True):
                for name, value in before.items():
                    if isinstance(value, Tensor) and isinstance(group[name], Tensor):
                        group[name].copy_(value)  # a captured step reads the tensor
                    else:
                        group[name] = value


def _settings(optimizer: Optimizer) -> list[dict[str, Any]]:
    """The groups' values, without the parameters."""
    return [
        {k: v.clone() if isinstance(v, Tensor) else v for k, v in group.items() if k != "params"}
        for group in optimizer.param_groups
    ]

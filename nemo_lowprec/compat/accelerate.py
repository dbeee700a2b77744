"""Accelerate's marks on objects that an ``Accelerator`` has prepared, and its record of a skipped step."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.optim import Optimizer


def is_prepared(model: nn.Module) -> bool:
    """Whether an ``Accelerator`` has prepared ``model``."""
    return bool(getattr(model, "_is_accelerate_prepared", False))


def forget_prepared(model: nn.Module) -> None:
    """Have the next ``Accelerator.prepare`` wrap ``model``, which one has prepared for evaluation alone."""
    model.__dict__.pop("_is_accelerate_prepared", None)


def note_skipped(accelerator: Any, optimizer: Optimizer) -> None:
    """Have ``accelerator`` count the step of ``optimizer`` that runs now as skipped, and hold schedulers back.

    Accelerate takes a step for skipped where ``GradScaler`` has not called ``step``. A fused optimizer is called, and
    its kernel skips.
    """
    for wrapper in accelerator._optimizers:
        if wrapper.optimizer is optimizer:
            wrapper._accelerate_step_called = False

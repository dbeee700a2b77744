"""Base class of the chart's columns: the points of a training that an engine announces to each column."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer


class Column:
    """Base of a column's implementations. The methods do nothing here; a subclass overrides the methods that it needs.

    ``check`` raises before anything is changed; ``remove`` undoes ``install`` exactly.
    """

    def check(self, model: nn.Module, device: torch.device, training: bool) -> None:
        """Raise ValueError where ``model`` on ``device`` cannot be trained as the column declares."""

    def install(self, model: nn.Module, training: bool) -> None:
        """Change ``model`` in place. Without ``training``, ``remove`` gives the model its original bits back."""

    def settle(self) -> None:
        """Called before the first step, once the model is on its device or sharded."""

    def check_optimizer(self, optimizer: Optimizer) -> None:
        """Raise the ValueError that ``attach`` would raise; change nothing."""

    def attach(self, optimizer: Optimizer) -> None:
        """Change how ``optimizer`` steps, in place; ``remove`` undoes the change."""

    def before_forward(self) -> None:
        """Called before a forward pass: follow parameters that were unfrozen or written since the last step."""

    def before_backward(self) -> None:
        """Called before a backward pass."""

    @property
    def waits(self) -> bool:
        """Whether ``take_back`` must come before the next forward pass."""
        return False

    def after_step(self, skipped: bool | Tensor) -> None:
        """Called after an optimizer's step, or after a step that was skipped for a gradient that is not finite.

        Args:
            skipped: an FP32 scalar on the device where the host does not know yet, not 0 for a skipped step: the device
                skips by itself, and ``take_back`` follows if it has.
        """

    def take_back(self) -> None:
        """The step that ``after_step`` was told of was skipped on the device: be as after ``after_step(True)``."""

    def state_dict(self) -> dict[str, Any]:
        """The column's state beside weights and optimizer states, for a checkpoint: plain values and tensors."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the state of this or of another level; values that ``state`` lacks start afresh."""

    def remove(self) -> None:
        """Undo ``install`` and ``attach``: the model and the optimizers are as before."""

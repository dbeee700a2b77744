"""What a column of the chart does for one model: the steps of a training that an engine announces to each column."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer


class Column:
    """Base of a column's implementations. Each method does nothing here; a subclass overrides those that it needs.

    ``check`` raises before anything is changed; ``remove`` undoes ``install`` exactly.
    """

    def check(self, model: nn.Module, device: torch.device, training: bool) -> None:
        """Raise ValueError where the column cannot be had for ``model`` on ``device``."""

    def install(self, model: nn.Module, training: bool) -> None:
        """Change ``model`` in place; one that is not for ``training`` gets its very values back at ``remove``."""

    def settle(self) -> None:
        """Follow the model to its device, or to its shards; called before the first step."""

    def check_optimizer(self, optimizer: Optimizer) -> None:
        """Raise ValueError where ``attach`` would; change nothing."""

    def attach(self, optimizer: Optimizer) -> None:
        """Change how ``optimizer`` steps, in place; ``remove`` undoes it, for as long as the optimizer lives."""

    def before_forward(self) -> None:
        """Follow what was done to the model since the last step: parameters unfrozen, or written by hand."""

    def before_backward(self) -> None:
        """A backward pass begins."""

    def after_step(self, skipped: bool) -> None:
        """An optimizer has stepped, or its step was skipped because a gradient is not finite."""

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps of the column beside weights and optimizer states: plain values and tensors."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from the state of this or of another level: what ``state`` lacks starts afresh."""

    def remove(self) -> None:
        """Give the model, and the optimizers, back as they were."""

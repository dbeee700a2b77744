"""Settings of the optimizer: parameter groups of the weight decay, linear warm-up, then cosine decay."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from torch import nn


def decay_groups(module: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Two parameter groups: weight decay applies to matrices, and not to parameters of one dimension (biases, norms).

    This is the rule of Megatron-LM, so weight decay applies to embeddings, too. A tied parameter is listed once. Frozen
    parameters and empty groups are left out.
    """
    params = [p for p in module.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in params if p.dim() >= 2], "weight_decay": weight_decay, "name": "decay"},
        {"params": [p for p in params if p.dim() < 2], "weight_decay": 0.0, "name": "no_decay"},
    ]
    return [group for group in groups if group["params"]]


def default_warmup(total_steps: int) -> int:
    """A tenth of the run, at most 2,000 optimizer steps."""
    return min(2000, total_steps // 10)


def warmup_cosine(warmup_steps: int, total_steps: int, floor: float) -> Callable[[int], float]:
    """Factor of the peak learning rate at an optimizer step, for ``LambdaLR``.

    The factor rises linearly to 1 over ``warmup_steps`` (the first step has 1/warmup_steps of the peak), falls along
    half a cosine to ``floor`` at ``total_steps``, and stays at ``floor``.

    Args:
        warmup_steps: optimizer steps of the warm-up, 0 for none.
        total_steps: optimizer steps of the run.
        floor: factor at the end, min_lr / lr.

    Raises:
        ValueError: the warm-up is negative or does not end before the run.
    """
    if warmup_steps < 0 or (warmup_steps and warmup_steps >= total_steps):
        raise ValueError(f"warmup_steps={warmup_steps} must be at least 0 and less than the run's {total_steps} steps.")

    # Not a callable object: LambdaLR would save its attributes, and a resumed run keep the old number of steps.
    def factor(step: int) -> float:
        if step < warmup_steps:
            return (step + 1) / warmup_steps
        progress = min(1.0, (step - warmup_steps) / max(1, total_steps - warmup_steps))
        return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * progress))

    return factor

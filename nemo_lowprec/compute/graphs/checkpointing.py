"""Blocks that transformers recomputes in backward: their graphs recompute them, and torch's checkpoint rests.

Torch's checkpoint stands around or within the block's forward, by the version of transformers. ``suspend`` takes the
checkpoint away; ``GraphedForward`` then replays graphs of a ``RecomputedPass``, and passes without a graph run under
``suspended_checkpoint``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from nemo_lowprec.compat.transformers import CHECKPOINT, is_checkpointed, is_plain_checkpoint


class Suspended:
    """Stands in the place of a block's checkpointing function, and calls the forward that it gets.

    Args:
        function: the block's checkpointing function, which copies and pickles of the block have.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function

    def __call__(self, forward: Callable[..., Any], *args: Any) -> Any:
        return forward(*args)

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., Any]:
        return self.function

    def __reduce__(self) -> Any:
        return _itself, (self.function,)


def _itself(function: Callable[..., Any]) -> Callable[..., Any]:
    return function


def suspend(block: nn.Module) -> bool:
    """Take the checkpoint of transformers away from a block. Returns whether the checkpoint is away."""
    if not is_checkpointed(block):
        return False
    function = block.__dict__[CHECKPOINT]
    if not isinstance(function, Suspended):
        if not is_plain_checkpoint(function):
            return False
        block.__dict__[CHECKPOINT] = Suspended(function)
    return True


def resume(block: nn.Module) -> None:
    """Give a block the checkpoint back that ``suspend`` took away."""
    function = block.__dict__.get(CHECKPOINT)
    if isinstance(function, Suspended):
        block.__dict__[CHECKPOINT] = function.function


def suspended_checkpoint(block: nn.Module) -> Callable[..., Any] | None:
    """The checkpointing function that ``suspend`` took away from a block, where a pass now is to be checkpointed."""
    function = block.__dict__.get(CHECKPOINT)
    wanted = block.training and torch.is_grad_enabled() and is_checkpointed(block)
    return function.function if isinstance(function, Suspended) and wanted else None

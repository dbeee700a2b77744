"""Modules of transformers and PEFT: experts of transformers' interface, checkpointed layers, an adapter's input."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

CHECKPOINT = "_gradient_checkpointing_func"  # the attribute of a layer that holds its checkpointing function
_PLAIN_ARGUMENTS = {"use_reentrant", "preserve_rng_state"}


def is_checkpointed(module: nn.Module) -> bool:
    """Whether transformers recomputes the module's forward in backward."""
    own = module.__dict__
    return bool(own.get("gradient_checkpointing")) and CHECKPOINT in own and _may_checkpoint(type(module))


def _may_checkpoint(cls: type) -> bool:
    return any(base.__name__ == "GradientCheckpointingLayer" for base in cls.__mro__)


def is_plain_checkpoint(function: Callable[..., Any]) -> bool:
    """Whether a checkpointing function is torch's, and recomputes all of a forward pass."""
    return isinstance(function, partial) and function.func is checkpoint and {*function.keywords} <= _PLAIN_ARGUMENTS


def apply_gate(experts: nn.Module, projected: Tensor) -> Tensor:
    """The gated activation [rows, features] of the first projection [rows, 2 * features] of experts with gates."""
    return experts._apply_gate(projected)  # type: ignore[operator,no-any-return]


def is_expert_parallel(experts: nn.Module) -> bool:
    """Whether transformers has spread the experts over processes."""
    return bool(getattr(experts, "_is_expert_parallel", False))


def cast_to_adapter(layer: Any, x: Tensor, dtype: torch.dtype) -> Tensor:
    """The input of an adapter of PEFT's ``layer``, whose weights have this dtype."""
    return layer._cast_input_dtype(x, dtype)  # type: ignore[no-any-return]

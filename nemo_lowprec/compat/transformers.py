"""Modules of transformers and PEFT: experts of transformers' interface, and the input of an adapter."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


def apply_gate(experts: nn.Module, projected: Tensor) -> Tensor:
    """What experts with gates compute of their first projection [rows, 2 * features]: [rows, features]."""
    return experts._apply_gate(projected)  # type: ignore[operator,no-any-return]


def is_expert_parallel(experts: nn.Module) -> bool:
    """Whether transformers has spread the experts over processes."""
    return bool(getattr(experts, "_is_expert_parallel", False))


def cast_to_adapter(layer: Any, x: Tensor, dtype: torch.dtype) -> Tensor:
    """The input of an adapter of PEFT's ``layer``, whose weights have this dtype."""
    return layer._cast_input_dtype(x, dtype)  # type: ignore[no-any-return]

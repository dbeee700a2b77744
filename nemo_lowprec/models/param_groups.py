"""Which parameters weight decay applies to."""

from __future__ import annotations

from typing import Any

from torch import nn

__all__ = ["decay_groups"]


def decay_groups(module: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Two parameter groups: weight decay applies to matrices, and not to parameters of one dimension (biases, norms).

    This is the rule of Megatron-LM, so weight decay applies to embeddings, too. A tied parameter is listed once, and a
    frozen parameter is left out.

    Args:
        module: the module with the parameters; empty groups are dropped.
        weight_decay: AdamW's decoupled decay for the matrices.
    """
    params = [p for p in module.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in params if p.dim() >= 2], "weight_decay": weight_decay, "name": "decay"},
        {"params": [p for p in params if p.dim() < 2], "weight_decay": 0.0, "name": "no_decay"},
    ]
    return [group for group in groups if group["params"]]

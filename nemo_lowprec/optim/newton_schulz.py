"""Newton–Schulz iteration in BF16 over a stack of matrices of one shape.

Source: torch.optim.Muon, whose numbers these are (Keller Jordan's Muon, https://kellerjordan.github.io/posts/muon/).
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

_ELEMENTS = 2**26  # of the matrices that are worked on at a time; Gram matrices take as much again, twice at most


@torch.no_grad()
def orthogonalize_(stack: Tensor, group: dict[str, Any]) -> None:
    """Replace each matrix of ``stack``, BF16 [matrices, rows, columns], by one of nearly equal singular values.

    Args:
        stack: contiguous; overwritten.
        group: Muon's ``ns_coefficients``, ``ns_steps`` and ``eps``.
    """
    if not stack.numel():
        return
    at_a_time = max(1, _ELEMENTS // stack[0].numel())
    for part in stack.split(at_a_time):
        part.copy_(_iterate(part, group))


def _iterate(part: Tensor, group: dict[str, Any]) -> Tensor:
    a, b, c = group["ns_coefficients"]
    is_tall = part.shape[-2] > part.shape[-1]
    x = part.mT if is_tall else part
    x = x / torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True).clamp(min=group["eps"])
    for _ in range(group["ns_steps"]):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if is_tall else x


def rate_factor(group: dict[str, Any], shape: torch.Size) -> float:
    """The factor of the learning rate for matrices [rows, columns], after Muon's ``adjust_lr_fn``."""
    rows, columns = shape[-2:]
    kind = group["adjust_lr_fn"]
    if kind == "match_rms_adamw":
        return 0.2 * math.sqrt(max(rows, columns))
    return math.sqrt(max(1, rows / columns))

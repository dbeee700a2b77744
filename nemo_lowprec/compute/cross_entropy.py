"""The passes of cross entropy over half logits, computed in FP32 without an FP32 copy of the logits.

forward   the losses, and of each row the log of the sum of exponentials; save the half logits
backward  one kernel that reads the logits and writes their half gradient
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from nemo_lowprec.compat.autograd import is_batched, is_legacy_batched
from nemo_lowprec.compute.autocast import AutocastOff
from nemo_lowprec.compute.backends.base import Backend


def half_cross_entropy(backend: Backend, logits: Tensor, targets: Tensor, ignore: int, reduction: str) -> Tensor:
    """``F.cross_entropy(logits.float(), targets, ignore_index=ignore, reduction=reduction)`` of half logits.

    Args:
        backend: computes.
        logits: [rows, classes].
        targets: int64 [rows].
        reduction: ``mean``, ``sum`` or ``none``.

    Returns:
        FP32, a scalar or [rows]. On a GPU a target that is neither a class nor ``ignore`` gives NaN.
    """
    return _CrossEntropy.apply(logits, targets, ignore, reduction, backend)  # type: ignore[no-any-return]


class _CrossEntropy(torch.autograd.Function):
    """(logits, targets, ignore, reduction, backend) to the loss."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, ignore: int, reduction: str, backend: Backend) -> Tensor:
        with AutocastOff("cuda" if logits.is_cuda else logits.device.type):
            losses, lse = backend.cross_entropy(logits, targets, ignore)
            count = (targets != ignore).sum().float() if reduction == "mean" else None
        ctx.save_for_backward(logits, targets, lse, count)
        ctx.ignore, ctx.reduction, ctx.backend = ignore, reduction, backend
        if reduction == "none":
            return losses
        total = losses.sum()
        return total if count is None else total / count

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        logits, targets, lse, count = ctx.saved_tensors
        with AutocastOff("cuda" if logits.is_cuda else logits.device.type):  # a loop may call backward() under autocast
            # No kernel computes what is differentiated again, or a batch of gradients.
            if torch.is_grad_enabled() or is_batched(grad) or is_legacy_batched(grad):
                return _again(grad, logits, targets, ctx.ignore, ctx.reduction), None, None, None, None
            scale = (grad if count is None else grad / count).reshape(-1).contiguous()
            dx = ctx.backend.cross_entropy_backward(logits, targets, lse, scale, ctx.ignore)
            return dx, None, None, None, None


def _again(grad: Tensor, logits: Tensor, targets: Tensor, ignore: int, reduction: str) -> Tensor:
    """The gradient of the logits by operations that have derivatives of any order."""
    with torch.enable_grad():
        loss = F.cross_entropy(logits.float(), targets, ignore_index=ignore, reduction=reduction)
    return torch.autograd.grad(loss, logits, grad, create_graph=torch.is_grad_enabled())[0]

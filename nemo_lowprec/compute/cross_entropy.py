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
from nemo_lowprec.kernels.loader import loss_kernels


def half_cross_entropy(logits: Tensor, targets: Tensor, ignore: int, reduction: str) -> Tensor:
    """``F.cross_entropy(logits.float(), targets, ignore_index=ignore, reduction=reduction)`` of half logits.

    Args:
        logits: [rows, classes].
        targets: int64 [rows].
        reduction: ``mean``, ``sum`` or ``none``.

    Returns:
        FP32, a scalar or [rows]. On a GPU a target that is neither a class nor ``ignore`` gives NaN.
    """
    return _CrossEntropy.apply(logits, targets, ignore, reduction)  # type: ignore[no-any-return]


class _CrossEntropy(torch.autograd.Function):
    """(logits, targets, ignore, reduction) to the loss."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, ignore: int, reduction: str) -> Tensor:
        with AutocastOff("cuda" if logits.is_cuda else logits.device.type):
            kernels = _kernels(logits, targets)
            if kernels is None:
                losses, lse = _forward(logits, targets, ignore)
            else:
                losses, lse = kernels.forward(logits, targets, ignore)
            count = (targets != ignore).sum().float() if reduction == "mean" else None
        ctx.save_for_backward(logits, targets, lse, count)
        ctx.ignore, ctx.reduction = ignore, reduction
        if reduction == "none":
            return losses
        total = losses.sum()
        return total if count is None else total / count

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        logits, targets, lse, count = ctx.saved_tensors
        with AutocastOff("cuda" if logits.is_cuda else logits.device.type):  # a loop may call backward() under autocast
            # No kernel computes what is differentiated again, or a batch of gradients.
            if torch.is_grad_enabled() or is_batched(grad) or is_legacy_batched(grad):
                return _again(grad, logits, targets, ctx.ignore, ctx.reduction), None, None, None
            scale = (grad if count is None else grad / count).reshape(-1).contiguous()
            kernels = _kernels(logits, targets)
            how = _backward if kernels is None else kernels.backward
            return how(logits, targets, lse, scale, ctx.ignore), None, None, None


def _kernels(logits: Tensor, targets: Tensor) -> Any:
    kernels = loss_kernels() if logits.is_cuda else None
    return kernels if kernels is not None and kernels.fits(logits, targets) else None


def _own(values: Tensor, targets: Tensor, ignore: int) -> tuple[Tensor, Tensor]:
    """Each row's target, 0 where there is none, and whether there is one; [rows, 1]."""
    there = (targets != ignore).unsqueeze(1)
    return torch.where(there, targets.unsqueeze(1), 0), there


def _forward(logits: Tensor, targets: Tensor, ignore: int) -> tuple[Tensor, Tensor]:
    """``triton_cross_entropy.forward`` by torch's operations."""
    values = logits.float()
    lse = values.logsumexp(1)
    place, there = _own(values, targets, ignore)
    losses = lse - values.gather(1, place).squeeze(1)
    return torch.where(there.squeeze(1), losses, 0.0), lse


def _backward(logits: Tensor, targets: Tensor, lse: Tensor, scale: Tensor, ignore: int) -> Tensor:
    """``triton_cross_entropy.backward`` by torch's operations."""
    place, there = _own(logits, targets, ignore)
    scale = torch.where(there, scale.unsqueeze(1), 0.0)
    grad = (logits.float() - lse.unsqueeze(1)).exp_().mul_(scale)
    return grad.scatter_add_(1, place, -scale).to(logits.dtype)


def _again(grad: Tensor, logits: Tensor, targets: Tensor, ignore: int, reduction: str) -> Tensor:
    """The gradient of the logits by operations that have derivatives of any order."""
    with torch.enable_grad():
        loss = F.cross_entropy(logits.float(), targets, ignore_index=ignore, reduction=reduction)
    return torch.autograd.grad(loss, logits, grad, create_graph=torch.is_grad_enabled())[0]

"""Losses and gradients of half logits in FP32, by torch's operations: the reference of ``triton_cross_entropy``."""

from __future__ import annotations

import torch
from torch import Tensor


def _own(targets: Tensor, ignore: int) -> tuple[Tensor, Tensor]:
    """Each row's target, 0 where there is none, and whether there is one; [rows, 1]."""
    there = (targets != ignore).unsqueeze(1)
    return torch.where(there, targets.unsqueeze(1), 0), there


def losses_of(logits: Tensor, targets: Tensor, ignore: int) -> tuple[Tensor, Tensor]:
    """The losses, and the logs of the sums of exponentials, as ``triton_cross_entropy.forward`` returns them."""
    values = logits.float()
    lse = values.logsumexp(1)
    place, there = _own(targets, ignore)
    losses = lse - values.gather(1, place).squeeze(1)
    return torch.where(there.squeeze(1), losses, 0.0), lse


def gradient_of(logits: Tensor, targets: Tensor, lse: Tensor, scale: Tensor, ignore: int) -> Tensor:
    """The gradient of the logits, as ``triton_cross_entropy.backward`` returns it."""
    place, there = _own(targets, ignore)
    scale = torch.where(there, scale.unsqueeze(1), 0.0)
    grad = (logits.float() - lse.unsqueeze(1)).exp_().mul_(scale)
    return grad.scatter_add_(1, place, -scale).to(logits.dtype)

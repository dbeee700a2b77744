"""Makes an optimizer's gradients true gradients: divides by the loss scale, clips, and looks for non-finite values."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.optim import Optimizer

from nemo_lowprec.grads.clip import clip_grad_norm_
from nemo_lowprec.grads.loss_scale import LossScale
from nemo_lowprec.grads.unscale import find_nonfinite, unscale_
from nemo_lowprec.tensors import QuantizedTensor
from nemo_lowprec.tensors.dtensor import local_shard


class TrueGradients:
    """The gradients of each optimizer of one model: whether they were unscaled, and their norms.

    Args:
        loss_scale: the loss scale of the level; None where the loss is not scaled.
    """

    def __init__(self, loss_scale: LossScale | None) -> None:
        self._loss_scale = loss_scale
        self._unscaled: WeakKeyDictionary[Optimizer, tuple[Tensor, Any]] = WeakKeyDictionary()
        self._norms: WeakKeyDictionary[Optimizer, Tensor] = WeakKeyDictionary()

    def begin(self) -> None:
        """Note that a backward pass begins, whose gradients are scaled."""
        self._unscaled.clear()

    def unscale(self, optimizer: Optimizer, device: torch.device) -> None:
        """Divide the gradients of ``optimizer`` by the loss scale, once a backward pass."""
        if self._loss_scale is not None and optimizer not in self._unscaled:
            params = params_of(optimizer)
            found = unscale_(params, self._loss_scale.used, device)
            self._unscaled[optimizer] = found, _writes(params)  # callbacks may write gradients before the step

    def clip(self, optimizer: Optimizer, max_norm: float, device: torch.device) -> Tensor | None:
        """Scale the gradients down to ``max_norm``.

        Returns:
            FP32 scalar, 1 where a gradient of this process is not finite, else 0; None where ``find`` was called.
        """
        norm = self._norms[optimizer] = clip_grad_norm_(params_of(optimizer), max_norm)
        found, _ = self._unscaled.pop(optimizer, (None, None))
        if self._loss_scale is not None and found is None:
            return None
        infinite = (~norm.isfinite()).float().to(device)
        return infinite if found is None else torch.maximum(infinite, found)

    def norm(self, optimizer: Optimizer, needed: bool) -> Tensor | None:
        """The L2 norm of the gradients, FP32 scalar, from ``clip`` or, if ``needed``, computed anew; else None."""
        norm = self._norms.pop(optimizer, None)
        return clip_grad_norm_(params_of(optimizer), 0.0) if norm is None and needed else norm

    def find(self, optimizer: Optimizer, device: torch.device) -> Tensor:
        """FP32 scalar on ``device``: 1 where a gradient of this process is not finite, else 0."""
        params = params_of(optimizer)
        found, writes = self._unscaled.pop(optimizer, (None, None))
        if found is None:
            return find_nonfinite(params, device)
        if writes is None or writes != _writes(params):
            return torch.maximum(found, find_nonfinite(params, device))
        return found


def params_of(optimizer: Optimizer) -> list[Tensor]:
    """The parameters of all groups of ``optimizer``."""
    return [p for group in optimizer.param_groups for p in group["params"]]


def _writes(params: list[Tensor]) -> list[tuple[int, int, int]] | None:
    """A value that changes when a gradient is written or replaced; None with FP8 gradients, which keep such a flag."""
    grads = [(grad, local_shard(grad)) for p in params if (grad := p.grad) is not None]
    if any(isinstance(local, QuantizedTensor) for _, local in grads):
        return None
    return [(id(grad), grad._version, local._version) for grad, local in grads]

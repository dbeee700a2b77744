"""The true gradients of an optimizer: divided by the loss scale, clipped, and known to be finite or not."""

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
    """What was done since the last backward pass with the gradients of each optimizer of one model.

    Args:
        loss_scale: of the level; None where the loss is not scaled.
    """

    def __init__(self, loss_scale: LossScale | None) -> None:
        self._loss_scale = loss_scale
        self._unscaled: WeakKeyDictionary[Optimizer, tuple[Tensor, Any]] = WeakKeyDictionary()
        self._norms: WeakKeyDictionary[Optimizer, Tensor] = WeakKeyDictionary()

    def begin(self) -> None:
        """A backward pass begins: its gradients are scaled."""
        self._unscaled.clear()

    def unscale(self, optimizer: Optimizer, device: torch.device) -> None:
        """Divide the gradients by the loss scale, once a backward pass."""
        if self._loss_scale is not None and optimizer not in self._unscaled:
            params = params_of(optimizer)
            found = unscale_(params, self._loss_scale.used, device)
            self._unscaled[optimizer] = found, _writes(params)  # callbacks may write gradients until the step

    def clip(self, optimizer: Optimizer, max_norm: float, device: torch.device) -> Tensor | None:
        """Scale the gradients down to ``max_norm``.

        Returns:
            1 where a gradient is not finite on this process, else 0: FP32 scalar; None where ``find`` knew before.
        """
        norm = self._norms[optimizer] = clip_grad_norm_(params_of(optimizer), max_norm)
        found, _ = self._unscaled.pop(optimizer, (None, None))
        if self._loss_scale is not None and found is None:
            return None
        infinite = (~norm.isfinite()).float().to(device)
        return infinite if found is None else torch.maximum(infinite, found)

    def norm(self, optimizer: Optimizer, needed: bool) -> Tensor | None:
        """The L2 norm of the gradients, FP32 scalar: that of ``clip`` before this step; computed anew if ``needed``."""
        norm = self._norms.pop(optimizer, None)
        return clip_grad_norm_(params_of(optimizer), 0.0) if norm is None and needed else norm

    def find(self, optimizer: Optimizer, device: torch.device) -> Tensor:
        """1 where a gradient is not finite on this process, else 0: an FP32 scalar on ``device``."""
        params = params_of(optimizer)
        found, writes = self._unscaled.pop(optimizer, (None, None))
        if found is None:
            return find_nonfinite(params, device)
        if writes is None or writes != _writes(params):
            return torch.maximum(found, find_nonfinite(params, device))
        return found


def params_of(optimizer: Optimizer) -> list[Tensor]:
    """The parameters of all groups."""
    return [p for group in optimizer.param_groups for p in group["params"]]


def _writes(params: list[Tensor]) -> list[tuple[int, int, int]] | None:
    """Changes when a gradient is written or replaced; None with FP8 gradients, which note what is not finite."""
    grads = [(p.grad, local_shard(p.grad)) for p in params if p.grad is not None]
    if any(isinstance(local, QuantizedTensor) for _, local in grads):
        return None
    return [(id(grad), grad._version, local._version) for grad, local in grads]

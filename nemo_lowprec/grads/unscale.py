"""Divides gradients by the loss scale, in FP32, and looks for non-finite gradients, on the device."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable

import torch
from torch import Tensor

from nemo_lowprec.compat.tensors import sparse_values
from nemo_lowprec.tensors import GradientTensor
from nemo_lowprec.tensors.dtensor import local_shard


@torch.no_grad()
def unscale_(params: Iterable[Tensor], scale: float, device: torch.device) -> Tensor:
    """Divide the gradients of ``params`` by ``scale``, in place. FP16 gradients become FP32 (``widen_fp16``).

    Each process reads its own shards of sharded gradients. Sparse gradients are coalesced.

    Returns:
        FP32 scalar on ``device``: 1 where a gradient of this process is not finite, else 0.
    """
    grads: dict[tuple[torch.device, torch.dtype], list[Tensor]] = defaultdict(list)
    halves: list[Tensor] = []
    params = list(params)
    widen_fp16(params)
    for param in params:
        grad = param.grad
        if grad is None:
            continue
        if grad.is_sparse:
            grad = grad.float().coalesce()  # sums rows that occur twice in FP32
            _replace(param, grad)
            grads[grad.device, grad.dtype].append(grad.values())
        elif grad.dtype == torch.bfloat16:  # the parameter has no master and steps in BF16
            halves.append(grad.div_(scale))
        else:
            grads[grad.device, grad.dtype].append(local_shard(grad))
    found = [_nonfinite(halves, device)]
    for (place, _), tensors in grads.items():
        one = torch.zeros((), device=place, dtype=torch.float32)
        torch._amp_foreach_non_finite_check_and_unscale_(
            tensors, one, torch.full((), 1.0 / scale, device=place, dtype=torch.float32)
        )
        found.append(one.to(device))
    return torch.stack(found).amax()


def widen_fp16(params: Iterable[Tensor]) -> None:
    """Make FP16 gradients FP32, one at a time: a division in FP16 would round small values to zero."""
    for param in params:
        if param.grad is not None and param.grad.dtype == torch.float16:
            _replace(param, param.grad.float())


def _replace(param: Tensor, grad: Tensor) -> None:
    param.grad = None
    param.grad_dtype = None  # any
    param.grad = grad


@torch.no_grad()
def find_nonfinite(params: Iterable[Tensor], device: torch.device) -> Tensor:
    """Look for non-finite gradients of ``params``; changes nothing.

    Each process reads its own shards of sharded gradients. FP8 gradients keep a flag beside the stored values.

    Returns:
        FP32 scalar on ``device``: 1 where a gradient of this process is not finite, else 0.
    """
    return _nonfinite([p.grad for p in params if p.grad is not None], device)


def _nonfinite(grads: list[Tensor], device: torch.device) -> Tensor:
    stored: list[GradientTensor] = []
    plain: dict[tuple[torch.device, torch.dtype], list[Tensor]] = defaultdict(list)
    for grad in grads:
        local = local_shard(grad)
        if isinstance(local, GradientTensor):
            stored.append(local)
            continue
        if local.is_sparse:
            local = sparse_values(local)
        if local.numel():  # an empty shard has no largest magnitude
            plain[local.device, local.dtype].append(local)
    found = [GradientTensor.any_nonfinite(stored)] if stored else []
    for tensors in plain.values():
        # A maximum is NaN where an element is NaN and, unlike a sum of squares, finite where all elements are finite.
        largest = torch.stack(torch._foreach_norm(tensors, math.inf))
        found.append((~(largest < math.inf).all()).float())
    if not found:
        return torch.zeros((), device=device, dtype=torch.float32)
    found = [flag.to(device) for flag in found]
    return torch.stack(found).amax() if len(found) > 1 else found[0]

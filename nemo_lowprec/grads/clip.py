"""Clipping by norm, with MS-AMP's rule for "norm only"."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from nemo_lowprec.grads.fp8_storage import is_released
from nemo_lowprec.tensors.dtensor import is_sharded, local_shard


def _over_shards(norm: Tensor, norm_type: float, grad: Any) -> Tensor:
    """The norm of the whole gradients, FP32 scalar, from the norm of this process's shards."""
    group = grad.device_mesh.get_group(grad.device_mesh.ndim - 1)
    power, kind = (1.0, dist.ReduceOp.MAX) if norm_type == math.inf else (norm_type, dist.ReduceOp.SUM)
    total = norm**power
    dist.all_reduce(total, kind, group)
    return total ** (1 / power)


@torch.no_grad()
def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
) -> Tensor:
    """``torch.nn.utils.clip_grad_norm_``, which with ``max_norm <= 0`` only computes the norm and clips nothing.

    FP8 gradients are neither decoded nor rounded again: one kernel computes their norms from the stored bytes, and the
    coefficient becomes part of their scales. (torch's own function works too, and decodes one gradient at a time.)

    Raises:
        RuntimeError: the norm is not finite, with ``error_if_nonfinite``.
        ValueError: gradient release has stepped the parameters already.

    Returns:
        The total norm before clipping, an FP32 scalar.
    """
    params = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    if any(is_released(p) for p in params):
        raise ValueError("gradient_release=True has stepped these parameters already. Leave it out, or the clipping.")
    grads = [p.grad for p in params if p.grad is not None]
    if not grads:
        return torch.zeros((), dtype=torch.float32)
    by_device: dict[torch.device, list[Tensor]] = defaultdict(list)
    for grad in grads:
        local = local_shard(grad)
        if local.is_sparse and max_norm <= 0:  # torch does not clip sparse gradients, either
            local = local.coalesce().values()
        by_device[grad.device].append(local)
    device = grads[0].device
    norms = [n.float().to(device) for group in by_device.values() for n in torch._foreach_norm(group, norm_type)]
    total = torch.linalg.vector_norm(torch.stack(norms), norm_type)
    if is_sharded(grads[0]):
        total = _over_shards(total, norm_type, grads[0])
    if error_if_nonfinite and not bool(total.isfinite()):
        raise RuntimeError(f"The total norm of order {norm_type} is {float(total)}, so the gradients were not clipped.")
    if max_norm > 0:
        coefficient = (max_norm / (total + 1e-6)).clamp(max=1.0)
        for place, group in by_device.items():
            torch._foreach_mul_(group, coefficient.to(place))
    return total

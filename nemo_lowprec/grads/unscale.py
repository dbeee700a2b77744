"""Divide gradients by the loss scale and look for overflows, in FP32."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import torch
from torch import Tensor

from nemo_lowprec.formats.local import local_of

__all__ = ["unscale_"]


@torch.no_grad()
def unscale_(params: Iterable[Tensor], scale: float) -> bool:
    """Unscale the gradients of ``params``; return whether any of them is not finite.

    FP16 gradients become FP32 first, one at a time: dividing them in FP16 would round small ones to zero.

    Of sharded gradients each process sees its part.

    Raises:
        RuntimeError: a sparse gradient.
    """
    grads: dict[tuple[torch.device, torch.dtype], list[Tensor]] = defaultdict(list)
    overflow = False
    for param in params:
        if param.grad is None:
            continue
        if param.grad.is_sparse:
            raise RuntimeError(
                "FP16 loss scaling cannot unscale sparse gradients: build the embedding with sparse=False."
            )
        if param.grad.dtype == torch.bfloat16:  # of a parameter without a master, which steps in BF16
            param.grad.div_(scale)
            overflow = overflow or not bool(param.grad.isfinite().all())
            continue
        if param.grad.dtype == torch.float16:
            grad = param.grad.float()
            param.grad = None
            param.grad_dtype = None  # any
            param.grad = grad
        grads[param.grad.device, param.grad.dtype].append(local_of(param.grad))
    for (device, _), tensors in grads.items():
        found = torch.zeros(1, device=device)
        torch._amp_foreach_non_finite_check_and_unscale_(tensors, found, torch.full((1,), 1.0 / scale, device=device))
        overflow = overflow or bool(found.item())
    return overflow

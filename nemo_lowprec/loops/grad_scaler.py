"""Lets torch's ``GradScaler`` unscale FP16 gradients, and see infinities that saturate in an FP8 GEMM.

``GradScaler.unscale_`` refuses FP16 gradients, and finds infinities in gradients only. For the optimizers of a prepared
model gradients become FP32 before they are divided by the scale, and the engine tells whether a gradient or an operand
of an FP8 GEMM is not finite on any process. Other optimizers are unscaled as by torch.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch.amp import GradScaler
from torch.optim import Optimizer

from nemo_lowprec.compat.modules import UNSCALE_METHOD
from nemo_lowprec.grads.unscale import widen_fp16

_FOUND = "_lowprec_found"  # attribute of an optimizer: the function of ``tell_grad_scaler``
_unscale = getattr(GradScaler, UNSCALE_METHOD)


def tell_grad_scaler(optimizer: Optimizer, found: Callable[[Tensor], Tensor]) -> None:
    """Have torch's ``GradScaler`` ask ``found`` whether to skip the step of ``optimizer``.

    Args:
        found: takes an FP32 scalar on the device, 1 where a gradient of this process is not finite, else 0; returns
            the same for the gradients and the FP8 operands of all processes.
    """
    optimizer.__dict__[_FOUND] = found


@wraps(_unscale)
def _unscale_grads_(
    self: GradScaler, optimizer: Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
) -> Any:  # fmt: skip
    found = optimizer.__dict__.get(_FOUND)
    if found is None:
        return _unscale(self, optimizer, inv_scale, found_inf, allow_fp16)
    widen_fp16(p for group in optimizer.param_groups for p in group["params"])
    per_device: dict[torch.device, Tensor] = _unscale(self, optimizer, inv_scale, found_inf, allow_fp16)
    flags = list(per_device.values())
    if flags:
        bad = found(torch.stack([flag.to(flags[0].device).float().reshape(()) for flag in flags]).amax())
        for flag in flags:
            flag.copy_((bad > 0).to(flag.dtype))
    return per_device


setattr(GradScaler, UNSCALE_METHOD, _unscale_grads_)

"""The passes of a norm whose kernels run on a GPU (``kernels/triton_norm.py``).

forward   normalize; save the input and FP32 statistics
backward  one kernel for all gradients, which adds what comes back past the norm (``residual.py``); by torch's
          operations where the gradients are differentiated again
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from nemo_lowprec.compat.autograd import apply_function, is_batched, is_legacy_batched, unwrap_if_dead
from nemo_lowprec.compute.autocast import AutocastOff
from nemo_lowprec.compute.backends.base import NormKind, is_transformed, plain_norm
from nemo_lowprec.compute.residual import (
    branch_dtype,
    forget,
    hand_out,
    learn,
    leave_half,
    take_normed,
)
from nemo_lowprec.compute.shared_input import InputGradient, no_values
from nemo_lowprec.tensors.gradient import gradient_dtype


class NormFunction(torch.autograd.Function):
    """(input, weight, bias, call) to the result, and the handle for a sum that reads the input (``residual.py``).

    ``call``: the kernels, the kind of norm, the dtype of the result, the dtype of the branch before or None, the
    gradient that the sum adds or None, and the result and statistics if the sum has computed them, else None.
    """

    @staticmethod
    def forward(ctx: Any, x, weight, bias, call):
        kernels, kind, out, ctx.branch, ctx.gradient, made = call
        how = kind.eps, kind.layer, kind.zero_centered, out, True
        y, stats = made or kernels.forward(x if x.is_contiguous() else x.contiguous(), weight, bias, *how)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, weight, bias, stats)
        ctx.kernels, ctx.kind, ctx.out = kernels, kind, out
        ctx.dtypes = tuple(None if param is None else gradient_dtype(param) for param in (weight, bias))
        return y, None if ctx.gradient is None else no_values(x)

    @staticmethod
    def backward(ctx: Any, grad_output, _):
        total = None
        if ctx.gradient is not None:
            total = ctx.gradient.take()
            forget(ctx.gradient)
        if grad_output is None:
            return total, None, None, None
        x, weight, bias, stats = ctx.saved_tensors
        needs, kind = ctx.needs_input_grad[:3], ctx.kind
        # No kernel computes with a batch of gradients (``is_grads_batched``, ``vmap``).
        again = torch.is_grad_enabled() or is_batched(grad_output) or is_legacy_batched(grad_output)
        if again or is_transformed():
            dx, *others = _by_torch(needs, (x, weight, bias), kind, ctx.out, grad_output)
            return dx if total is None or dx is None else dx + total, *others, None
        grad = grad_output if grad_output.is_contiguous() else grad_output.contiguous()
        values = x if x.is_contiguous() else x.contiguous()
        how = kind.layer, kind.zero_centered, needs, ctx.dtypes
        if total is not None and not total.is_contiguous():
            total = total.contiguous()
        half = torch.empty_like(values, dtype=ctx.branch) if ctx.branch is not None and needs[0] else None
        found = ctx.kernels.backward(grad, values, weight, bias, stats, *how, total=total, half=half)
        if half is not None:
            leave_half(found[0], half)
        return *found, None


_apply = apply_function(NormFunction)


def fused_norm(
    kernels: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, kind: NormKind, out: torch.dtype
) -> Tensor:
    """The norm by ``kernels``, where they fit."""
    trained = x.requires_grad or (weight is not None and weight.requires_grad)
    if torch.is_grad_enabled() and (trained or (bias is not None and bias.requires_grad)):
        gradient = InputGradient() if x.requires_grad else None
        call = kernels, kind, out, branch_dtype(x), gradient, take_normed(x, weight, bias, kind, out)
        y, handle = _apply(*(t if t is None else unwrap_if_dead(t) for t in (x, weight, bias)), call)
        if gradient is not None:
            learn(x, kernels, weight, bias, kind, out)
            hand_out(x, gradient, handle)
        return y  # type: ignore[no-any-return]
    made: Tensor = kernels.forward(
        x.detach().contiguous(), weight, bias, kind.eps, kind.layer, kind.zero_centered, out, False
    )[0]
    return made


def _by_torch(
    needs: tuple[bool, ...], tensors: tuple[Tensor | None, ...], kind: NormKind, out: torch.dtype, grad: Tensor
) -> list[Tensor | None]:
    """The gradients of ``tensors`` by torch's operations, which have derivatives of any order."""
    x, weight, bias = tensors
    assert x is not None
    wanted = [t for t, need in zip(tensors, needs, strict=True) if t is not None and need]
    create_graph = torch.is_grad_enabled()
    with torch.enable_grad(), AutocastOff(x.device.type):
        y = plain_norm(x, weight, bias, kind, out)
    found = iter(torch.autograd.grad(y, wanted, grad, create_graph=create_graph))
    return [next(found) if need else None for need in needs]

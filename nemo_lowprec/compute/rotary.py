"""Rotary position embedding of queries and keys in one pass each way.

``RotaryForm`` says what a function of a user's model computes; ``FusedRotary`` computes the same and takes the
function's place. The results lie in memory as [batch, seq, heads, dim], whatever view of that memory they are, and so
do the gradients: attention, and the projections behind, read both without a copy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nemo_lowprec.compat.autograd import apply_function, is_batched, is_legacy_batched, unwrap_if_dead
from nemo_lowprec.compute.autocast import AutocastOff
from nemo_lowprec.compute.backends.base import is_transformed
from nemo_lowprec.kernels.loader import rotary_kernels


class RotaryForm(NamedTuple):
    """A rotary position embedding. It rotates pairs of elements of the last dimension, as the plane's points.

    Attributes:
        tensors: how many tensors one call rotates: 2 for query and key.
        axis: where cos and sin [batch, seq, rotary dim] get a dimension for the heads, if the call does not say. Below
            0 also for tensors without a batch.
        takes_axis: whether the call may say so, by ``unsqueeze_dim``.
        layouts: where the pairs are in the input, in the result, and their factors in cos and sin. "halves": elements i
            and i + rotary dim / 2; "pairs": 2 * i and 2 * i + 1; "first", of factors: i for both.
        rounds: whether products are rounded to half before they are added, where cos and sin are half.
        rounds_grad: whether those of the backward pass are.
        keeps_dtype: whether the result of half input with FP32 cos and sin is half; else it is FP32. Under autocast it
            is half in any case: attention would round it.
        partial: whether elements beyond the rotary dim are passed through; else there must be none.
    """

    tensors: int
    axis: int
    takes_axis: bool
    layouts: tuple[str, str, str]
    rounds: bool
    rounds_grad: bool
    keeps_dtype: bool
    partial: bool


class FusedRotary:
    """Computes what ``function`` does, by ``form``; calls ``function`` where it cannot.

    Half CUDA tensors are rotated by one kernel, half CPU tensors by torch's operations, with the same roundings.
    """

    def __init__(self, function: Callable[..., Any], form: RotaryForm) -> None:
        self.function, self.form = function, form

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        form, count = self.form, self.form.tensors
        axis = form.axis
        if form.takes_axis and len(kwargs) == 1 and "unsqueeze_dim" in kwargs:
            axis = kwargs["unsqueeze_dim"]
        elif kwargs:
            return self.function(*args, **kwargs)
        if len(args) != count + 2 or is_transformed() or not _fits(form, axis, args[:count], *args[count:]):
            return self.function(*args, **kwargs)
        if any(t.requires_grad for t in args[:count]) and torch.is_grad_enabled():
            found = _apply(form, axis, *map(unwrap_if_dead, args[count:]), *map(unwrap_if_dead, args[:count]))
        else:
            found = _forward(form, axis, args[count], args[count + 1], args[:count])
        return found[0] if count == 1 else tuple(found)


def _fits(form: RotaryForm, axis: Any, tensors: Sequence[Any], cos: Any, sin: Any) -> bool:
    """Whether the arguments are of the kind that the fused pass takes."""
    first = tensors[0]
    if not all(isinstance(t, Tensor) for t in (*tensors, cos, sin)):
        return False
    if first.dtype not in (torch.float16, torch.bfloat16) or first.dim() != cos.dim() + 1:
        return False
    if not (first.dim() == 4 or (first.dim() == 3 and form.axis < 0)):
        return False
    if cos.dtype not in (first.dtype, torch.float32) or cos.dtype != sin.dtype or cos.shape != sin.shape:
        return False
    if cos.requires_grad or sin.requires_grad or cos.is_inference() or sin.is_inference():
        return False
    if any(t.device != first.device for t in (*tensors, cos, sin)):
        return False
    heads = axis % first.dim()
    if heads not in (first.dim() - 3, first.dim() - 2):
        return False
    rotary = cos.shape[-1]
    for t in tensors:
        batch_seq_dim = [size for place, size in enumerate(t.shape) if place != heads]
        if t.dtype != first.dtype or t.dim() != first.dim() or batch_seq_dim[-2] != cos.shape[-2]:
            return False
        if t.dim() == 4 and (batch_seq_dim[0] != first.shape[0] or cos.shape[0] not in (1, batch_seq_dim[0])):
            return False
        if t.shape[-1] != first.shape[-1] or rotary > t.shape[-1] or (rotary < t.shape[-1] and not form.partial):
            return False
    return rotary > 0 and rotary % 2 == 0


class _Rotary(torch.autograd.Function):
    """(form, axis, cos, sin, the tensors) to the rotated tensors."""

    @staticmethod
    def forward(ctx: Any, form: RotaryForm, axis: int, cos: Tensor, sin: Tensor, *tensors: Tensor) -> Any:
        ctx.set_materialize_grads(False)
        # Not saved for backward, where a pass through one of the results would free them for the others.
        ctx.factors, ctx.versions = (cos, sin), (cos._version, sin._version)
        ctx.form, ctx.axis, ctx.dtype = form, axis, tensors[0].dtype
        return tuple(_forward(form, axis, cos, sin, tensors))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        cos, sin = ctx.factors
        if ctx.versions != (cos._version, sin._version):
            raise RuntimeError("cos or sin of a rotary embedding was changed in place before the backward pass.")
        there = [grad for grad in grads if grad is not None]
        turned = iter(_backward(ctx.form, ctx.axis, cos, sin, there, ctx.dtype) if there else ())
        return None, None, None, None, *(None if grad is None else next(turned) for grad in grads)


_apply = apply_function(_Rotary)


def _forward(form: RotaryForm, axis: int, cos: Tensor, sin: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
    half, device = tensors[0].dtype, tensors[0].device.type
    rounded = torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device) == half
    dtype = half if form.keeps_dtype or rounded else cos.dtype
    rounds = form.rounds and cos.dtype == half
    return _rotated(tensors, axis, cos, sin, form.layouts, rounds, False, dtype)


def _backward(
    form: RotaryForm, axis: int, cos: Tensor, sin: Tensor, grads: Sequence[Tensor], dtype: torch.dtype
) -> list[Tensor]:
    x, out, factors = form.layouts
    return _rotated(grads, axis, cos, sin, (out, x, factors), form.rounds_grad, True, dtype)


def _rotated(
    tensors: Sequence[Tensor], axis: int, cos: Tensor, sin: Tensor, layouts: tuple[str, str, str], rounds: bool,
    backward: bool, dtype: torch.dtype,
) -> list[Tensor]:  # fmt: skip
    kernels = rotary_kernels() if tensors[0].is_cuda else None
    again = torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
    again = again or any(is_batched(t) or is_legacy_batched(t) for t in tensors)
    if kernels is None or again:
        with AutocastOff(tensors[0].device.type):
            rotated = [_by_torch(t, axis, cos, sin, layouts, rounds, backward, dtype) for t in tensors]
        return rotated if again else [t.detach() for t in rotated]  # no views, which torch would forbid to change
    rows = [_rows(t, axis) for t in tensors]
    outs = [_like(t, axis, dtype) for t in tensors]
    cos, sin = (_last_contiguous(t if t.dim() == 3 else t[None]) for t in (cos, sin))
    kernels.rotate(rows, [_rows(out, axis) for out in outs], cos, sin, layouts, rounds, backward)
    return outs


def _rows(tensor: Tensor, axis: int) -> Tensor:
    """``tensor`` as [batch, seq, heads, dim], of which the last stride is 1."""
    heads = axis % tensor.dim()
    rows = tensor if heads == tensor.dim() - 2 else tensor.transpose(-2, -3)
    return _last_contiguous(rows if rows.dim() == 4 else rows[None])


def _last_contiguous(tensor: Tensor) -> Tensor:
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _like(tensor: Tensor, axis: int, dtype: torch.dtype) -> Tensor:
    """New memory of the shape of ``tensor``, laid out as [batch, seq, heads, dim]; no view."""
    if axis % tensor.dim() == tensor.dim() - 2:
        return torch.empty(tensor.shape, dtype=dtype, device=tensor.device)
    *_, heads, seq, dim = tensor.shape
    strides = (seq * heads * dim, dim, heads * dim, 1)[-tensor.dim() :]
    return torch.empty_strided(tensor.shape, strides, dtype=dtype, device=tensor.device)


def _by_torch(
    tensor: Tensor, axis: int, cos: Tensor, sin: Tensor, layouts: tuple[str, str, str], rounds: bool, backward: bool,
    dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """The definition, in operations that have derivatives."""
    heads, rotary = axis % tensor.dim() - tensor.dim(), cos.shape[-1]
    x = tensor if heads == -2 else tensor.transpose(-2, -3)
    cos, sin = cos.unsqueeze(-2).float(), sin.unsqueeze(-2).float()
    turned = x.float() if rotary == x.shape[-1] else x[..., :rotary].float()
    x0, x1 = _pairs(turned, layouts[0])
    (cos0, cos1), (sin0, sin1) = _pairs(cos, layouts[2]), _pairs(sin, layouts[2])
    if backward:  # the transposed rotation
        parts = (x0 * cos0, x1 * sin1), (x1 * cos1, -(x0 * sin0))
    else:
        parts = (x0 * cos0, -(x1 * sin0)), (x1 * cos1, x0 * sin1)
    if rounds:
        first, second = (own.to(dtype) + other.to(dtype) for own, other in parts)
    else:
        first, second = ((own + other).to(dtype) for own, other in parts)
    joined = torch.cat([first, second], -1) if layouts[1] == "halves" else torch.stack([first, second], -1).flatten(-2)
    out = joined if rotary == x.shape[-1] else torch.cat([joined, x[..., rotary:].to(dtype)], -1)
    out = out.contiguous()
    return out if heads == -2 else out.transpose(-2, -3)


def _pairs(t: Tensor, layout: str) -> tuple[Tensor, Tensor]:
    """The first and the second elements of the pairs."""
    half = t.shape[-1] // 2
    if layout == "pairs":
        return t[..., 0::2], t[..., 1::2]
    return t[..., :half], t[..., :half] if layout == "first" else t[..., half:]

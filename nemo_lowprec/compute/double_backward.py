"""The backward pass of a converted linear layer whose gradients are differentiated again (``create_graph=True``).

The same pass computes many gradients at once (``is_grads_batched=True``, ``vmap`` of ``torch.autograd.grad``).

The layer's two backward GEMMs then run in half precision on the weight parameter and on the input that the forward pass
saved, as operations of torch that autograd differentiates any number of times. Gradient penalties and forces reach the
weight, the bias, the input and the output gradient in this way.

For this pass, forward saves one empty tensor more, the link, whose node in the graph leads to the input.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from nemo_lowprec.compat.autograd import is_wanted
from nemo_lowprec.compute.again import Again
from nemo_lowprec.compute.backends.base import Backend
from nemo_lowprec.compute.operands import Operand
from nemo_lowprec.compute.shared_input import InputGradient

_CHUNK = 2048  # rows


def differentiable_backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """The gradients of (input [rows, in_features], weight, bias) for ``dy`` [rows, out_features].

    Args:
        ctx: the node of the layer's forward pass, ``LinearFunction``.

    Raises:
        RuntimeError: the weight was changed in place since the forward pass.
    """
    plan = ctx.plan
    need_dgrad, need_wgrad, need_bias = ctx.needs_input_grad[:3]
    dx = dw = db = None
    if need_dgrad:
        if ctx.version is not None and ctx.weight._version != ctx.version:
            raise RuntimeError("A layer's weight was changed in place before a second derivative of its output.")
        weight = ctx.weight.t() if ctx.transposed else ctx.weight
        weight = weight if weight.dim() == 2 else weight.flatten(1)
        weight = weight if ctx.part is None else weight[slice(*ctx.part)]
        dx = plan.backend.matmul(plan.in_half("grad_output", dy), plan.in_half("weight", weight), ctx.x_dtype)
        total = None if ctx.gradient is None else ctx.gradient.take()
        dx = dx if total is None else dx + total[: ctx.rows]
        if ctx.gradient is not None and not ctx.gives_out:
            hand_on(ctx, ctx.gradient, dx)
            dx = None
    if need_wgrad and is_wanted(ctx, 1):
        values = plan.in_half("input", saved_input(ctx))
        dw = plan.backend.matmul(plan.in_half("grad_output", dy).t(), values, ctx.grad_dtype)
        dw = dw.t() if ctx.transposed else dw
        if ctx.part is not None:
            dw = among_rows(dw, ctx.part, ctx.all_rows)
        dw = dw.reshape(ctx.weight.shape)
    if ctx.bias_dtype is not None and need_bias:
        db = dy.sum(0, dtype=torch.float32).to(ctx.bias_dtype)
    return dx, dw, db


def among_rows(values: Tensor, part: tuple[int, int], all_rows: int) -> Tensor:
    """A gradient [all_rows, ...] that is ``values`` in the rows of ``part``, and zero elsewhere."""
    return F.pad(values, (0, 0, part[0], all_rows - part[1]))


def hand_on(ctx: Any, gradient: InputGradient, total: Tensor) -> None:
    """Put ``total`` into ``gradient`` where this backward pass goes on to the layer that takes the sum."""
    # A sum that no layer takes would keep its graph alive, and the graph the sum.
    if is_wanted(ctx, 0):
        gradient.put(total)


def saved_input(ctx: Any) -> Tensor:
    """The saved input [rows, in_features] in half precision, linked to the graph that made the input."""
    plan, saved, (x_end, w_end) = ctx.plan, ctx.saved_tensors, ctx.splits
    if ctx.metas[0] is None:
        values = saved[0].reshape(-1, ctx.shape[-1])
    elif isinstance(ctx.metas[0], Again):
        values = ctx.metas[0].values(saved[:x_end]).reshape(-1, ctx.shape[-1]).to(plan.half)
    else:
        operand = plan.backend.restore(list(saved[:x_end]), ctx.metas[0])
        rows = ctx.rows + ctx.pad
        values = _values(plan.backend, operand, rows, plan.operands["input"], plan.half, ctx.weight.device)
    if ctx.gradient is None or not torch.is_grad_enabled():
        return values[: ctx.rows]
    found: Tensor = _LinkedInput.apply(saved[w_end], values[: ctx.rows], ctx.gradient, ctx.x_dtype, ctx.pad)
    return found


@torch.no_grad()
def _values(backend: Backend, x: Any, rows: int, kind: Operand, half: torch.dtype, device: torch.device) -> Tensor:
    """The values of an input's columnwise data, [rows, in_features] in half precision.

    Every backend reads columnwise data by its wgrad GEMM, so the values are the weight gradient of an identity matrix.
    """
    operand = replace(kind, scaling="current" if kind.scaling == "delayed" else kind.scaling, slot=None)
    row, width = torch.arange(rows, device=device).unsqueeze(1), min(_CHUNK, rows + -rows % 128)
    chunks = []
    for start in range(0, rows, width):
        columns = (row == torch.arange(start, start + width, device=device)).to(half)
        quantized = backend.quantize(columns, operand, rowwise=False, columnwise=True, record=False)
        chunks.append(backend.wgrad(quantized, x, half))
    return torch.cat(chunks)[:rows]


def link_to(x: Tensor) -> tuple[Tensor, InputGradient]:
    """(an empty tensor whose node in the graph leads to ``x``, the sum that this node returns as the gradient)."""
    total = InputGradient()
    link: Tensor = _Link.apply(x, total)
    return link, total


def linked(link: Tensor, values: Tensor, total: InputGradient) -> Tensor:
    """``values`` in the place of the tensor that ``link_to`` was called with, whose gradient adds to ``total``."""
    found: Tensor = _LinkedInput.apply(link, values, total, values.dtype, 0)
    return found


class _Link(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, total: InputGradient) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.total = total
        return x.new_empty(0)

    @staticmethod
    def backward(ctx: Any, _: Any) -> tuple[Tensor | None, None]:  # type: ignore[override]
        return ctx.total.take(), None


class _LinkedInput(torch.autograd.Function):
    """(link, values [rows, in_features]) to the values. Backward adds the values' gradient to the input's."""

    @staticmethod
    def forward(ctx: Any, link: Tensor, values: Tensor, gradient: InputGradient, dtype: Any, pad: int) -> Tensor:
        ctx.gradient, ctx.dtype, ctx.pad = gradient, dtype, pad
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, ...]:
        total = ctx.gradient.take()
        grad = grad.to(ctx.dtype)
        grad = grad if total is None else grad + total[: len(grad)]
        hand_on(ctx, ctx.gradient, F.pad(grad, (0, 0, 0, ctx.pad)))  # a copy, since the next layer adds in place
        return None, None, None, None, None

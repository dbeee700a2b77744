"""The passes of layers that read one tensor, as one: q, k and v of a block, its gate and up projections.

forward   quantize the input [M, K] (``SharedInput``), the weights below each other [N, K]; one ``backend.fprop`` to a
          joint output [M, N], or one for each layer's output
backward  quantize the output gradients side by side [M, N], one ``backend.dgrad``, one ``backend.wgrad``

The parameters' gradients are rows of one memory. Outputs that go different ways have memory of their own: of q, k and
v, attention keeps v for backward, and would keep all three.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from nemo_lowprec.compat.autograd import apply_function, is_batched, is_legacy_batched, is_wanted
from nemo_lowprec.compute.again import again_of
from nemo_lowprec.compute.autocast import AutocastOff
from nemo_lowprec.compute.double_backward import hand_on, saved_input
from nemo_lowprec.compute.linear_function import (
    columnwise_input,
    grad_buffers_of,
    input_to_save,
    not_a_view,
    read_grad_buffer,
)
from nemo_lowprec.compute.producers import computed, offered
from nemo_lowprec.compute.shared_input import no_values
from nemo_lowprec.tensors.gradient import computed_dtype, gradient_dtype


class GroupFunction(torch.autograd.Function):
    """(the input or its handle, weights, biases, call) to (the handle or None, outputs).

    ``call``, a tuple of what is no part of the graph:
        group: the ``LayerGroup``.
        x: the input [..., in_features].
        gradient, gives_out, out_dtype, record: as ``LinearFunction`` has them.
        joint: whether the result is one tensor.
    """

    @staticmethod
    def forward(ctx: Any, source: Tensor, *arguments: Any) -> tuple[Tensor | None, ...]:
        ctx.set_materialize_grads(False)
        *params, call = arguments
        group, x, gradient, gives_out, out_dtype, record, joint = call
        count, plan = len(group.plans), group.plans[0]
        weights, biases, backend = params[:count], params[count:], plan.backend
        ctx.versions = [weight._version for weight in weights]  # type: ignore[union-attr]
        needs = ctx.needs_input_grad
        need_dgrad, need_wgrad = needs[0], any(needs[1 : 1 + count])
        group.follow(weights, record)  # before the input is quantized, whose history may end here
        shape = x.shape
        values = x if len(shape) == 2 else x.reshape(-1, shape[-1])
        again = again_of(x, plan.inputs.again) if need_wgrad else None
        values = values if values.dtype == plan.half else values.to(plan.half)
        x8 = plan.inputs.quantize(
            backend, x, values, plan.operands["input"], rowwise=True, columnwise=need_wgrad and again is None,
            record=record,
        )  # fmt: skip
        group.share_input(x, record)
        saves = need_dgrad and group.saves_weights
        w8 = group.weight_operand(weights, True, saves)
        if plan.observers.quantized:
            _announce(group.plans, "input", [values] * count, [x8] * count)
            _announce(group.plans, "weight", weights, w8.split(group.widths, 0))  # type: ignore[arg-type]
        if joint:
            outs = [backend.fprop(x8, w8, _joined(biases, group.widths), out_dtype)]
        else:
            each = zip(w8.split(group.widths, 0), biases, strict=True)
            outs = [backend.fprop(x8, own, bias, out_dtype) for own, bias in each]

        x_tensors: list[Tensor | None] = []
        x_meta: Any = None
        if need_wgrad:
            x_tensors, x_meta = input_to_save(backend, x8, again)
        w_tensors, w_meta = list(weights) if need_dgrad else [], None
        if saves:
            w_tensors, w_meta = backend.save(w8)
        handle = no_values(x) if gives_out else None
        # The link: a second derivative reaches the input through it; it holds no values.
        link = [handle if gives_out else source] if need_wgrad and gradient is not None else []
        ctx.save_for_backward(*x_tensors, *w_tensors, *link)
        ctx.splits = len(x_tensors), len(x_tensors) + len(w_tensors)
        ctx.metas = x_meta, w_meta
        ctx.group, ctx.plan, ctx.record, ctx.joint = group, plan, record, joint
        ctx.weights, ctx.weight = weights, weights[0]
        ctx.shape, ctx.rows, ctx.pad, ctx.x_dtype = shape, len(values), 0, x.dtype
        ctx.bias_dtypes = [None if bias is None else bias.dtype for bias in biases]
        ctx.gradient, ctx.gives_out = gradient, gives_out
        for weight in weights:
            read_grad_buffer(weight)  # type: ignore[arg-type]
        return handle, *(not_a_view(out, [*shape[:-1], out.shape[1]]) for out in outs)

    @staticmethod
    def backward(ctx: Any, _: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        count = len(ctx.weights)
        dx, dws, dbs = None, [None] * count, [None] * count
        if all(grad is None for grad in grads):  # no output is a part of the loss; other readers of the input may be
            total = ctx.gradient.take() if ctx.gives_out else None
            dx = None if total is None else total[: ctx.rows]
        else:
            again = torch.is_grad_enabled() or any(
                grad is not None and (is_batched(grad) or is_legacy_batched(grad)) for grad in grads
            )
            there = None
            if ctx.joint and not again:
                there = offered(grads[0], ctx.plan.operands["grad_output"])  # type: ignore[arg-type]
            if ctx.joint and there is None:
                computed(grads[0])  # type: ignore[arg-type]
            # A loop may call backward() under autocast.
            with AutocastOff(ctx.weight.device.type):
                parts = _parts(ctx, grads)
                dx, dws, dbs = _differentiable_backward(ctx, parts) if again else _backward(ctx, parts, there)
            used = [True] * count if ctx.joint else [grad is not None for grad in grads]
            dws = [own if use else None for own, use in zip(dws, used, strict=True)]
            dbs = [own if use else None for own, use in zip(dbs, used, strict=True)]
        if dx is not None and len(ctx.shape) != 2:
            dx = dx.reshape(ctx.shape)
        return dx, *dws, *dbs, None


apply_group = apply_function(GroupFunction)


def _announce(plans: Sequence[Any], kind: str, values: Sequence[Tensor], operands: Sequence[Any]) -> None:
    for plan, own, operand in zip(plans, values, operands, strict=True):
        plan.announce(kind, own, operand)


def _joined(biases: Sequence[Tensor | None], widths: Sequence[int]) -> Tensor | None:
    """The biases as one, zeros for a layer without one; None for no bias at all."""
    there = [bias for bias in biases if bias is not None]
    if not there:
        return None
    each = zip(biases, widths, strict=True)
    return torch.cat([there[0].new_zeros(width) if bias is None else bias for bias, width in each])


def _parts(ctx: Any, grads: Sequence[Tensor | None]) -> list[Tensor]:
    """The output gradients [rows, features], one for each output; zeros for an output that is no part of the loss."""
    widths = [sum(ctx.group.widths)] if ctx.joint else ctx.group.widths
    return [
        torch.zeros(ctx.rows, width, dtype=ctx.plan.half, device=ctx.weight.device) if grad is None
        else grad if grad.dim() == 2 else grad.reshape(-1, width)
        for grad, width in zip(grads, widths, strict=True)
    ]  # fmt: skip


def _backward(
    ctx: Any, parts: list[Tensor], there: tuple[Any, Tensor | None] | None
) -> tuple[Tensor | None, list[Any], list[Any]]:
    """The gradients of the input [rows, in_features], of the weights and of the biases.

    Args:
        there: the gradient of a joint output as its maker has quantized it, and the sums of its columns.
    """
    plan, backend, count = ctx.plan, ctx.plan.backend, len(ctx.weights)
    needs = ctx.needs_input_grad
    need_dgrad, need_weights, need_biases = needs[0], needs[1 : 1 + count], needs[1 + count : -1]
    need_sums = any(need_biases)
    saved, (x_end, w_end) = ctx.saved_tensors, ctx.splits
    if there is None:
        halves = [part if part.dtype == plan.half else part.to(plan.half) for part in parts]
        dy8, sums = backend.quantize_parts(
            halves, plan.operands["grad_output"], rowwise=need_dgrad, columnwise=any(need_weights), record=ctx.record,
            sums=need_sums,
        )  # fmt: skip
    else:
        halves, (dy8, sums) = parts, there
    if plan.observers.quantized:
        each_half = halves[0].split(ctx.group.widths, 1) if ctx.joint else halves
        _announce(ctx.group.plans, "grad_output", each_half, dy8.split(ctx.group.widths, 1))
    dx = None
    dws: list[Any] = [None] * count
    dbs: list[Any] = [None] * count
    if need_dgrad:
        total = None if ctx.gradient is None else ctx.gradient.take()
        if ctx.metas[1] is not None:
            w8 = backend.restore(saved[x_end:w_end], ctx.metas[1])
        else:
            w8 = ctx.group.weight_operand(saved[x_end:w_end], False, True, is_later=True)
        dx = backend.dgrad(dy8, w8, ctx.x_dtype, total)
        if ctx.gradient is not None and not ctx.gives_out:
            ctx.gradient.put(dx)
            dx = None
    if any(need_weights):
        x8 = columnwise_input(ctx, saved[:x_end])
        dtypes = [computed_dtype(weight) for weight in ctx.weights]
        if all(need_weights) and len(set(dtypes)) == 1:
            dws = list(backend.wgrad(dy8, x8, dtypes[0], grad_buffers_of(ctx.weights)).split(ctx.group.widths))
        else:
            each = zip(dy8.split(ctx.group.widths, 1), dtypes, need_weights, strict=True)
            dws = [backend.wgrad(own, x8, dtype) if need else None for own, dtype, need in each]
    if need_sums:
        if sums is None:
            sums = torch.cat([part.sum(0, dtype=torch.float32) for part in parts])
        of_each = zip(sums.split(ctx.group.widths), ctx.bias_dtypes, need_biases, strict=True)
        dbs = [own.to(dtype) if need else None for own, dtype, need in of_each]
    return dx, dws, dbs


def _differentiable_backward(ctx: Any, parts: list[Tensor]) -> tuple[Tensor | None, list[Any], list[Any]]:
    """``_backward`` by operations of torch in half precision, as ``differentiable_backward``."""
    plan, backend, count = ctx.plan, ctx.plan.backend, len(ctx.weights)
    needs = ctx.needs_input_grad
    parts = list(parts[0].split(ctx.group.widths, 1)) if ctx.joint else parts
    halves = [plan.in_half("grad_output", part) for part in parts]
    dx = None
    if needs[0]:
        if ctx.versions != [weight._version for weight in ctx.weights]:
            raise RuntimeError("A layer's weight was changed in place before a second derivative of its output.")
        pairs = zip(halves, ctx.weights, strict=True)
        each = [backend.matmul(half, plan.in_half("weight", weight), ctx.x_dtype) for half, weight in pairs]
        total = None if ctx.gradient is None else ctx.gradient.take()
        dx = sum(each[1:], each[0])
        dx = dx if total is None else dx + total[: ctx.rows]
        if ctx.gradient is not None and not ctx.gives_out:
            hand_on(ctx, ctx.gradient, dx)
            dx = None
    wanted = [needs[1 + i] and is_wanted(ctx, 1 + i) for i in range(count)]
    values = plan.in_half("input", saved_input(ctx)) if any(wanted) else None
    dws = [
        backend.matmul(half.t(), values, gradient_dtype(weight)) if want and values is not None else None
        for half, weight, want in zip(halves, ctx.weights, wanted, strict=True)
    ]
    of_biases = zip(parts, ctx.bias_dtypes, needs[1 + count : -1], strict=True)
    dbs = [part.sum(0, dtype=torch.float32).to(dtype) if need and dtype else None for part, dtype, need in of_biases]
    return dx, dws, dbs

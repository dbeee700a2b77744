"""Forward and backward of a module of experts, as one node of autograd.

forward   quantize the tokens once, and put them in the order of their experts; the first grouped GEMM; the gate, times
          the routing's weight of each row, quantized; the second grouped GEMM; add the rows of each token
backward  the same from the end: two grouped GEMMs for each of the two projections. The gate is computed again

The routing's weights multiply the input of the second projection, which is linear: so backward needs no output of an
expert, and the products are added to nothing but FP32.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from nemo_lowprec.compute.autocast import AutocastOff
from nemo_lowprec.tensors import Fp8Weight
from nemo_lowprec.tensors.gradient import computed_dtype


class ExpertsFunction(torch.autograd.Function):
    """(tokens, routing's weights, up, down, up's bias, down's bias, call) to the module's output [tokens, features].

    ``call``, a tuple of what is no part of the graph:
        module, layout, gate: what is computed.
        plans: of the two projections.
        gemms: ``LoopGemms`` or ``FusedGemms`` of this call.
        out_dtype: dtype of the output.
        record: whether amaxes enter the histories.
        grad: whether autograd is on.
    """

    @staticmethod
    def forward(ctx: Any, tokens, scores, up, down, up_bias, down_bias, call):
        module, layout, gate, plans, gemms, out_dtype, record, grad = call
        up_plan, down_plan = plans
        needs = [grad and needed for needed in ctx.needs_input_grad[:6]]
        need_up, need_down = needs[2], needs[3]
        need_h = needs[0] or need_up or needs[4]  # backward reaches the first projection
        need_rows = need_h or need_down or needs[1]
        half = tokens.to(up_plan.half)
        factor = gemms.routing.in_rows(scores).float()

        for plan, weight in zip(plans, (up, down), strict=True):
            if plan.weight is not None:
                plan.weight.follow(weight, record)
        x = gemms.gather(
            half, up_plan, "input", rowwise=up_plan.fp8[0], columnwise=need_up and up_plan.fp8[2], record=record
        )  # fmt: skip
        up8, up_kept = _weight(gemms, up, up_plan, layout.transposed, needs[0])
        h = gemms.fprop(x, up8, up_plan, outs_of(up, layout.transposed))
        h = h if up_bias is None else gemms.add_bias(h, up_bias)
        a = gemms.activate(
            h, factor, gate, module, down_plan,
            rowwise=down_plan.fp8[0], columnwise=need_down and down_plan.fp8[2], record=record,
        )  # fmt: skip
        down8, down_kept = _weight(gemms, down, down_plan, layout.transposed, need_h or needs[1])
        rows = gemms.fprop(a, down8, down_plan, outs_of(down, layout.transposed))
        rows = rows if down_bias is None else gemms.add_bias(rows, down_bias, factor)
        out = gemms.combine(rows, out_dtype)

        saved = [
            gemms.save(x, up_plan, up_plan.fp8[2]) if need_up else None,
            _saved_weight(gemms, up, up8, up_plan, up_kept) if needs[0] else None,
            gemms.save(a, down_plan, down_plan.fp8[2]) if need_down else None,
            _saved_weight(gemms, down, down8, down_plan, down_kept) if need_h or needs[1] else None,
        ]
        tensors = [tensor for part in saved if part is not None for tensor in part[0]]
        ctx.metas = [None if part is None else (len(part[0]), part[1]) for part in saved]
        ctx.save_for_backward(*tensors, h if need_rows else None, factor, up_bias, down_bias)
        ctx.call, ctx.needs, ctx.shapes = call, needs, (tokens.dtype, scores.shape, scores.dtype)
        ctx.weights = up, down
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad):
        with AutocastOff("cuda" if grad.is_cuda else grad.device.type):
            return (*_backward(ctx, grad), None)


def outs_of(weight: Tensor, transposed: bool) -> int:
    """The output features of a projection with ``weight``."""
    return weight.shape[2 if transposed else 1]


def _ins_of(weight: Tensor, transposed: bool) -> int:
    return weight.shape[1 if transposed else 2]


def _weight(gemms: Any, weight: Tensor, plan: Any, transposed: bool, need_dgrad: bool) -> tuple[Any, bool]:
    """The weight as the forward GEMM reads it, and whether it has the form that backward reads, too."""
    # A weight that is stored in FP8 is transposed again in backward, which takes less memory than two orientations.
    keeps = plan.weight is not None and plan.weight.keeps
    kept = need_dgrad and plan.keeps_weight and (keeps or not isinstance(weight, Fp8Weight))
    return gemms.weight(weight, plan, transposed, rowwise=plan.fp8[0], columnwise=kept and plan.fp8[1]), kept


def _saved_weight(gemms: Any, weight: Tensor, operand: Any, plan: Any, kept: bool) -> tuple[list[Any], Any]:
    return gemms.save(operand, plan, plan.fp8[1]) if kept else ([weight], None)


def _backward(ctx: Any, grad: Tensor) -> list[Tensor | None]:
    module, layout, gate, plans, gemms, _, record, _ = ctx.call
    up_plan, down_plan = plans
    up, down = ctx.weights
    need_x, need_scores, need_up, need_down, need_up_bias, need_down_bias = ctx.needs
    *saved, h, factor, up_bias, down_bias = ctx.saved_tensors
    operands: list[Any] = []
    at = 0
    for place, meta in enumerate(ctx.metas):
        if meta is None:
            operands.append(None)
            continue
        tensors, plan = saved[at : at + meta[0]], plans[place // 2]
        at += meta[0]
        if meta[1] is None:  # a weight that is quantized again
            operands.append(gemms.weight(tensors[0], plan, layout.transposed, rowwise=False, columnwise=plan.fp8[1]))
        else:
            operands.append(gemms.restore(tensors, meta[1], plan))
    x, up8, a, down8 = operands
    dtype, shape, scores_dtype = ctx.shapes
    need_h = need_x or need_up or need_up_bias
    found: list[Tensor | None] = [None] * 6

    half = grad.to(down_plan.half)
    dy = gemms.gather(
        half, down_plan, "grad_output",
        rowwise=(need_h or need_scores) and down_plan.fp8[1], columnwise=need_down and down_plan.fp8[2], record=record,
    )  # fmt: skip
    if need_down:
        found[3] = gemms.wgrad(dy, a, down_plan, down.shape, layout.transposed, computed_dtype(down))
    if need_down_bias or (need_scores and down_bias is not None):
        rows = half[gemms.routing.tokens]
        if need_down_bias:
            found[5] = gemms.bias_gradient(rows, down_bias, factor)
    if need_h or need_scores:
        da = gemms.dgrad(dy, down8, down_plan, _ins_of(down, layout.transposed))
        dh8, dh, dfactor = gemms.activate_backward(
            da, h, factor, gate, module, up_plan,
            rowwise=need_x and up_plan.fp8[1], columnwise=need_up and up_plan.fp8[2], record=record,
            half=need_up_bias,
        )  # fmt: skip
        if need_scores:
            if down_bias is not None:
                dfactor = dfactor + (rows.float() * gemms.add_bias(torch.zeros_like(rows), down_bias).float()).sum(1)
            found[1] = gemms.routing.in_pairs(dfactor).view(shape).to(scores_dtype)
        if need_up:
            found[2] = gemms.wgrad(dh8, x, up_plan, up.shape, layout.transposed, computed_dtype(up))
        if need_up_bias:
            found[4] = gemms.bias_gradient(dh, up_bias)
        if need_x:
            dx = gemms.dgrad(dh8, up8, up_plan, _ins_of(up, layout.transposed))
            found[0] = gemms.combine(dx, dtype)
    return found

"""The passes of a converted linear layer in few steps on the host, for most calls of training.

``linear_function`` defines the passes. This file launches the same kernels in the same order, so that the results are
equal bit for bit. ``flat_call`` and the top of ``FlatLinear.backward`` list the conditions; where a condition does not
hold, ``linear_function`` computes the pass.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from nemo_lowprec.compat.autograd import apply_function, is_batched, is_legacy_batched
from nemo_lowprec.compat.tensors import dispatch_modes
from nemo_lowprec.compute.again import is_computed_again
from nemo_lowprec.compute.backends.base import Orientation, QuantizedOperand, is_whole
from nemo_lowprec.compute.backends.scaled_mm import ScaledMMBackend
from nemo_lowprec.compute.gemm_plan import GemmPlan
from nemo_lowprec.compute.linear_function import (
    LinearFunction,
    grad_buffer_of,
    new_weight_operand,
    read_grad_buffer,
)
from nemo_lowprec.compute.operands import Operand
from nemo_lowprec.compute.producers import GradReader, computed, offered
from nemo_lowprec.compute.shared_input import no_values
from nemo_lowprec.kernels.fp8_gemm import OUTER, PER_TENSOR, gemm_at, multiplies_rows
from nemo_lowprec.kernels.fp8_gemm import is_supported as has_gemm
from nemo_lowprec.kernels.loader import fused_kernels
from nemo_lowprec.kernels.memory import new
from nemo_lowprec.tensors.gradient import computed_dtype, gradient_dtype


def is_flat(plan: GemmPlan) -> bool:
    """Whether calls of the layer with ``plan`` may be computed here."""
    scaled = plan.recipe is not None and plan.recipe.scaling in ("delayed", "current", "rowwise", "blockwise")
    on_gpu = isinstance(plan.backend, ScaledMMBackend) and fused_kernels() is not None and has_gemm()
    return scaled and on_gpu and _has_gemms(plan) and all(plan.fp8) and plan.weight is not None and plan.keeps_weight


_SUM_FAST = (PER_TENSOR, OUTER)  # the scales with which the tensor cores may sum alone, without FP32


def _has_gemms(plan: GemmPlan) -> bool:
    """Whether ``gemm_at`` runs the three GEMMs of the layer."""
    if plan.backend.scales_of_weight is not OUTER:  # type: ignore[attr-defined]
        return True
    device, x = torch.cuda.current_device(), plan.operands["input"].fmt.dtype
    dy, fast = plan.operands["grad_output"].fmt.dtype, plan.backend.fast_accum
    return multiplies_rows(device, x, x, plan.half, True) and all(
        multiplies_rows(device, dy, x, out, fast) for out in (plan.half, torch.float32)
    )


def flat_call(x: Tensor, weight: Tensor, bias: Tensor | None, plan: GemmPlan, out_dtype: torch.dtype) -> Tensor | None:
    """The layer's output for ``x`` [..., in_features], whose amaxes enter the histories; None where a condition fails.

    Args:
        weight: [out_features, in_features].
        out_dtype: of the output.
    """
    half, shape = plan.half, x.shape
    ins = shape[-1]
    rows = x.numel() // ins if ins else 0
    if (
        type(x) is not Tensor or x.dtype != half or out_dtype != half or not x.requires_grad or x.is_leaf
        or not weight.requires_grad or rows == 0 or rows % 16 or not x.is_contiguous() or plan.observers.quantized
        or weight.is_inference() or dispatch_modes() or is_computed_again(x, plan.inputs.again)
    ):  # fmt: skip
        return None
    state: Any = plan.weight
    state.follow(weight, True)  # before the input is quantized, whose history may end here
    operand = plan.operands["input"]
    slot = operand.slot
    if (slot is not None and slot.cold) or not state.keeps:
        return None
    w8 = state.kept(True, True)
    if w8 is None:
        with torch.no_grad():
            w8 = new_weight_operand(weight, plan, rowwise=True, columnwise=True)
        state.keep(w8, True, True, False)
    if not state.is_whole:
        return None
    x8 = _quantized_input(x, rows, plan, operand)
    if x8 is None:
        return None
    gradient, handle = plan.inputs.gradient(x)
    gradient.readers.append(plan)
    gives_out = handle is None
    out, given_out = _apply(x if handle is None else handle, weight, bias, (plan, x, rows, x8, w8, gradient, gives_out))
    if gives_out:
        plan.inputs.give_out(x, gradient, given_out)
    if slot is not None:
        GradReader.add(plan, out, True, True, bias is not None and bias.requires_grad, True)
    return out  # type: ignore[no-any-return]


def _quantized_input(x: Tensor, rows: int, plan: GemmPlan, operand: Operand) -> QuantizedOperand | None:
    """The operand of ``x``, in whole orientations; None where the caller has to quantize ``x``."""
    if plan.inputs.is_new(x):
        made = _quantized(x, rows, x.shape[-1], plan, operand)
        if made is not None:
            plan.inputs.offer(
                plan.backend, x, made, operand, shape=(rows, x.shape[-1]), dtype=x.dtype, rowwise=True, columnwise=True,
                record=True,
            )  # fmt: skip
        return made
    values = x if x.dim() == 2 else x.view(rows, -1)
    made = plan.inputs.quantize(plan.backend, x, values, operand, rowwise=True, columnwise=True, record=True)
    return made if is_whole(made) else None


def _quantized(values: Tensor, rows: int, cols: int, plan: GemmPlan, operand: Operand) -> QuantizedOperand | None:
    """``backend.quantize`` in both orientations, for the contiguous ``values`` of a layer that trains."""
    if operand.layout is not None:
        matrix = values if values.dim() == 2 else values.view(rows, cols)
        blocks: QuantizedOperand = plan.backend.quantize(matrix, operand, rowwise=True, columnwise=True, record=True)
        return blocks
    kernels: Any = fused_kernels()
    slot = operand.slot
    scale, record = (None, None) if slot is None else (slot.scale, slot.amax)
    made = kernels.quantize_again(values, rows, cols, scale, operand.fmt, record, operand.margin)
    if made is None:
        return None
    row, col, scale_inv = made
    return QuantizedOperand(Orientation(row, scale_inv, None), Orientation(col, scale_inv, None))


class FlatLinear(torch.autograd.Function):
    """(the input or its handle, weight, bias, call) to (output, the handle where this layer gives it out).

    ``call``: the plan, the input, its rows, its operand, the operand of the weight, and ``gradient`` and
    ``gives_out`` of ``LinearFunction``.
    """

    @staticmethod
    def forward(ctx, source, weight, bias, call):
        ctx.set_materialize_grads(False)
        plan, x, rows, x8, w8, gradient, gives_out = call
        shape, half = x.shape, plan.half
        (row, scale_inv, layout), (col, col_scale_inv, _) = x8.rowwise, x8.columnwise
        (w_row, w_scale_inv, w_layout), (w_col, w_col_scale_inv, _) = w8.rowwise, w8.columnwise
        outs, ins = w_row.shape
        device, scales = x.get_device(), plan.backend.scales_of_weight
        out = new(device, (*shape[:-1], outs), half)
        gemm_at(
            device, rows, outs, ins, row.dtype, w_row.dtype, row.data_ptr(), w_row.data_ptr(), scale_inv,
            w_scale_inv, out, outs, scales in _SUM_FAST, bias if bias is None or bias.dtype == half else bias.to(half),
            False, scales,
        )  # fmt: skip
        handle = no_values(x) if gives_out else None
        # The link: a second derivative reaches the input through it; it holds no values.
        ctx.save_for_backward(col, col_scale_inv, w_col, w_col_scale_inv, handle if gives_out else source)
        ctx.plan, ctx.shape, ctx.rows, ctx.gradient, ctx.gives_out = plan, shape, rows, gradient, gives_out
        ctx.layouts, ctx.weight, ctx.version = (layout, w_layout), weight, weight._version
        ctx.bias_dtype = None if bias is None else bias.dtype
        read_grad_buffer(weight)
        return out, handle

    @staticmethod
    def backward(ctx, dy, _):
        plan = ctx.plan
        operand = plan.operands["grad_output"]
        slot = operand.slot
        need_dgrad, need_wgrad, need_bias = ctx.needs_input_grad[:3]
        if (
            type(dy) is not Tensor or dy.dtype != plan.half or not (need_dgrad and need_wgrad) or not dy.is_contiguous()
            or torch.is_grad_enabled() or plan.observers.quantized or (slot is not None and slot.cold)
            or is_batched(dy) or is_legacy_batched(dy)
        ):  # fmt: skip
            return _general_backward(ctx, dy)
        x_col, x_scale_inv, w_col, w_scale_inv, _ = ctx.saved_tensors
        rows, (ins, outs) = ctx.rows, w_col.shape
        need_sums = ctx.bias_dtype is not None and need_bias
        there = offered(dy, operand)
        if there is not None:
            dy8, sums = there
            if not is_whole(dy8):
                return _general_backward(ctx, dy)
        elif need_sums:
            computed(dy)
            dy8, sums = plan.backend.quantize_grad(
                dy.view(rows, outs), operand, rowwise=True, columnwise=True, record=True, sums=True
            )
        else:
            computed(dy)
            dy8, sums = _quantized(dy, rows, outs, plan, operand), None
            if dy8 is None:
                dy8 = plan.backend.quantize(dy.view(rows, outs), operand, rowwise=True, columnwise=True, record=True)
        (row, scale_inv, _), (col, col_scale_inv, _) = dy8.rowwise, dy8.columnwise
        gradient, weight, backend = ctx.gradient, ctx.weight, plan.backend
        fast = backend.fast_accum and backend.scales_of_weight in _SUM_FAST
        device, fmt, w_fmt = dy.get_device(), row.dtype, w_col.dtype
        total = gradient.take()
        if total is not None and not total.is_contiguous():
            total = total.contiguous()
        whole = ctx.gives_out and total is None
        dx = new(device, ctx.shape if whole else (rows, ins), plan.half) if total is None else total
        gemm_at(
            device, rows, ins, outs, fmt, w_fmt, row.data_ptr(), w_col.data_ptr(), scale_inv, w_scale_inv, dx, ins,
            fast, None, total is not None, backend.scales_of_weight,
        )  # fmt: skip
        dw = grad_buffer_of(weight)
        if dw is None or dw.stride(1) != 1:
            dw = new(device, (outs, ins), computed_dtype(weight))
        gemm_at(
            device, outs, ins, rows, fmt, x_col.dtype, col.data_ptr(), x_col.data_ptr(), col_scale_inv, x_scale_inv, dw,
            dw.stride(0), fast, None, False, backend.scales_of_wgrad,
        )  # fmt: skip
        if not ctx.gives_out:
            gradient.put(dx)
            dx = None
        else:
            if not whole:
                dx = dx.view(ctx.shape)
            if len(gradient.readers) > 1:
                plan.inputs.see(gradient.readers)
        db = None
        if need_sums:
            db = (dy.view(rows, outs).sum(0, dtype=torch.float32) if sums is None else sums).to(ctx.bias_dtype)
        return dx, dw, db, None


_apply = apply_function(FlatLinear)


def _general_backward(ctx: Any, dy: Tensor | None) -> Any:
    """The backward pass of ``LinearFunction``, of what ``FlatLinear`` has saved."""
    ctx.splits, ctx.metas = (2, 4), tuple((layout,) for layout in ctx.layouts)
    ctx.record, ctx.transposed, ctx.pad, ctx.part, ctx.all_rows = True, False, 0, None, len(ctx.weight)
    ctx.x_dtype, ctx.grad_dtype = ctx.plan.half, gradient_dtype(ctx.weight)
    return LinearFunction.backward(ctx, dy, None)

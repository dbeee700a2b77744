"""A linear layer with half weights whose weight gradient is the FP32 accumulator of its GEMM, not rounded to half.

Autograd would round the gradient to the weight's dtype and then make an FP32 copy. That pass over every gradient costs
more than the GEMM's wider output. Source: Megatron-LM's ``gradient_accumulation_fusion``.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nemo_lowprec.compute.autocast import AutocastOff
from nemo_lowprec.compute.backends.base import half_matmul, is_transformed
from nemo_lowprec.compute.compiled import has_own_weight, read_storage, sink_of
from nemo_lowprec.compute.double_backward import among_rows
from nemo_lowprec.compute.gemm_plan import GemmPlan
from nemo_lowprec.compute.linear_function import not_a_view
from nemo_lowprec.tensors.gradient import computed_dtype, gradient_dtype


class HalfLinear(nn.Linear):
    """``nn.Linear`` for a half weight with an FP32 gradient. Conversion makes it of an ``nn.Linear``.

    In ``torch.func``, ``torch.jit.trace``, evaluation, and with other dtypes it is an ``nn.Linear``.

    Attributes:
        gemm_plan: announces the operands; None for a layer that was made without ``convert``.
    """

    gemm_plan: GemmPlan | None = None

    def forward(self, input: Tensor) -> Tensor:
        if torch.compiler.is_compiling():
            return _compiled_layer(self, input)
        return half_linear(input, self.weight, self.bias, None, self.gemm_plan)


def half_linear(
    input: Tensor, weight: Tensor, bias: Tensor | None, part: tuple[int, int] | None, plan: GemmPlan | None
) -> Tensor:
    """``F.linear`` with an FP32 weight gradient that is not rounded to half.

    Args:
        part: (first row, row behind the last) of ``weight`` to multiply with; None for all rows.
        plan: announces the operands; None for nobody.
    """
    if plan is not None and plan.by_torch and plan.observers.quantized:
        plan.announce("input", input, input.to(plan.half))
        plan.announce("weight", weight, weight.to(plan.half))
    if torch.is_grad_enabled() and weight.requires_grad:
        device, half = input.device.type, weight.dtype
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else input.dtype
        fits = dtype == half and half != torch.float32 and (bias is None or bias.dtype == half)
        if fits and gradient_dtype(weight) == torch.float32 and not is_transformed():
            with AutocastOff(device):
                out: Tensor = _HalfLinearFunction.apply(
                    input.to(half), weight, bias, (part, plan, computed_dtype(weight))
                )
            return out
    return F.linear(input, weight if part is None else weight[slice(*part)], bias)


def _compiled_layer(layer: HalfLinear, x: Tensor) -> Tensor:
    plan = layer.gemm_plan
    if plan is None or not (plan.entry.prepare() and has_own_weight(layer, "weight", plan.entry)):
        return F.linear(x, layer.weight, layer.bias)
    own = plan.entry.bias
    bias = layer.bias if own.data is None else own.data
    return compiled_half_linear(x, layer, "weight", bias, plan, False, None, sink_of(own))


def compiled_half_linear(
    input: Tensor,
    layer: nn.Module,
    name: str,
    bias: Tensor | None,
    plan: GemmPlan,
    transposed: bool,
    part: tuple[int, int] | None,
    bias_sink: Tensor | None = None,
) -> Tensor:
    """``half_linear`` in the code that ``torch.compile`` traces; see ``compiled_linear``. Never ``transposed``.

    Args:
        bias_sink: takes the gradient of ``bias``, in its own dtype; None where ``bias`` does.
    """
    own = plan.entry.weight
    if own.data is None:
        weight = getattr(layer, name)
        return F.linear(input, weight if part is None else weight[slice(*part)], bias)
    return _in_graph(  # type: ignore[no-any-return]
        input, sink_of(own), own.data, own.scale_inv, own.dtype, own.sums_in_fp32, bias, bias_sink, part
    )


@torch.compiler.allow_in_graph
def _in_graph(
    input: Tensor, sink: Tensor | None, data: Tensor, scale_inv: Tensor | None, half: torch.dtype,
    sums_in_fp32: bool, bias: Tensor | None, bias_sink: Tensor | None, part: tuple[int, int] | None,
) -> Tensor:  # fmt: skip
    """``half_linear`` of a weight that reads as ``half`` while the compiler records what it does."""
    device = input.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else input.dtype
    fits = dtype == half and half != torch.float32 and (bias is None or bias.dtype == half)
    if sink is not None and fits and sums_in_fp32:
        weight = read_storage(None, data, scale_inv, half)
        taker = bias if bias_sink is None else bias_sink
        with AutocastOff(device):
            out: Tensor = _SinkingHalfLinear.apply(input.to(half), sink, taker, (part, None, sink.dtype), weight, bias)
        return out
    weight = read_storage(sink, data, scale_inv, half)
    if bias is not None and bias_sink is not None:
        bias = read_storage(bias_sink, bias, None, bias.dtype)
    return F.linear(input, weight if part is None else weight[slice(*part)], bias)


class _HalfLinearFunction(torch.autograd.Function):
    """(input [..., in_features], weight, bias or None, call), all half, to the output [..., out_features].

    ``call``: the rows of the weight or None, the plan or None, and the dtype of the weight's gradient.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, call: Any) -> Tensor:
        part, plan, ctx.grad_dtype = call
        ctx.part, ctx.plan = part, plan
        ctx.save_for_backward(x, weight)
        shape, x = x.shape, x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
        own = weight if part is None else weight[slice(*part)]
        if plan is not None and plan.observers.quantized:
            plan.announce("input", x, x)
            plan.announce("weight", own, own)
        out = F.linear(x, own, bias)
        return out if len(shape) == 2 else not_a_view(out, [*shape[:-1], out.shape[1]])

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        shape, x = x.shape, x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
        grad_output = grad_output if len(shape) == 2 else grad_output.reshape(-1, grad_output.shape[-1])
        need_x, need_weight, need_bias = ctx.needs_input_grad[:3]
        if ctx.plan is not None and ctx.plan.observers.quantized:
            ctx.plan.announce("grad_output", grad_output, grad_output)
        with AutocastOff(grad_output.device.type):  # a loop may call backward() under autocast
            dx = grad_output @ (weight if ctx.part is None else weight[slice(*ctx.part)]) if need_x else None
            dw = db = None
            if need_weight:
                dw = half_matmul(grad_output.t(), x, ctx.grad_dtype)
                dw = dw if ctx.part is None else among_rows(dw, ctx.part, weight.shape[0])
            if need_bias:
                db = grad_output.sum(0, dtype=torch.float32)
        if dx is not None and len(shape) != 2:
            dx = dx.view(shape)
        return dx, dw, db, None


class _SinkingHalfLinear(_HalfLinearFunction):
    """The same, whose weight and bias are the takers of their gradients; their values are the last two arguments."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, x: Tensor, sink: Tensor, taker: Any, call: Any, weight: Tensor, bias: Tensor | None
    ) -> Tensor:
        return _HalfLinearFunction.forward(ctx, x, weight, bias, call)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        return *_HalfLinearFunction.backward(ctx, grad_output), None, None

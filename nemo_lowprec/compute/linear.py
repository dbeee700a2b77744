"""The converted linear layer: an ``nn.Linear`` whose three GEMMs run at the level's precision.

The layer's ``GemmPlan`` says which of the GEMMs run in FP8, on which backend and with which operands. The steps:

forward   quantize the input [M, K] (``SharedInput``) and the weight [N, K], ``backend.fprop``; save the columnwise data
backward  quantize the output gradient [M, N], ``backend.dgrad`` adds to the input's gradient, ``backend.wgrad``

Formats and scales of the operands are in ``operands.py``, the GEMMs in ``backends/``.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nemo_lowprec.compat.autograd import is_batched, is_legacy_batched, is_tracing, outside_transforms
from nemo_lowprec.compute.backends.base import Backend, is_transformed
from nemo_lowprec.compute.double_backward import among_rows, differentiable_backward
from nemo_lowprec.compute.operands import Operand
from nemo_lowprec.compute.shared_input import InputGradient, SharedInput
from nemo_lowprec.compute.weight_scales import WeightScale
from nemo_lowprec.observers import NOBODY, Observers
from nemo_lowprec.options import Recipe
from nemo_lowprec.tensors import Fp8Weight, Fp16Weight, QuantizedTensor, stored_data


@dataclass
class GemmPlan:
    """How a layer computes.

    Attributes:
        backend: runs the GEMMs; None for ``HalfLinear``, which torch computes.
        half: dtype of inputs and outputs, and of GEMMs that are not in FP8.
        recipe: None for a layer whose GEMMs all run in half precision.
        operands: the layer's ``input``, ``weight`` and ``grad_output``; none without a recipe.
        inputs: the ``SharedInput`` of all layers of the model that have a recipe.
        keeps_weight: whether forward makes and saves the weight's columnwise operand for backward. False for a weight
            that is gathered again in backward: forward then saves nothing of it, but for an input without elements.
        name: the layer's name in the model.
        observers: of the engine that converted the layer; each operand is announced to them when it is ready.
    """

    backend: Backend
    half: torch.dtype
    recipe: Recipe | None = None
    operands: dict[str, Operand] = field(default_factory=dict)
    inputs: SharedInput = field(default_factory=SharedInput)
    keeps_weight: bool = True
    name: str = ""
    observers: Observers = NOBODY

    @property
    def fp8(self) -> tuple[bool, bool, bool]:
        """Which of (fprop, dgrad, wgrad) run in FP8."""
        if self.recipe is None:
            return (False, False, False)
        fprop, dgrad, wgrad = self.recipe.override_linear_precision
        return (not fprop, not dgrad, not wgrad)

    def in_half(self, kind: str, values: Tensor) -> Tensor:
        """The operand ``kind`` [rows, features] of a GEMM in half precision."""
        if isinstance(values, QuantizedTensor) and not torch.is_grad_enabled() and not is_tracing():
            half = values.dequantize(self.half)  # which has no derivative, and is not traced
        else:
            half = values.to(self.half)
        if self.observers.quantized:
            self.announce(kind, values, half)
        return half

    def announce(self, kind: str, values: Tensor, operand: Any) -> None:
        """Tell ``observers`` that an operand is ready (see ``Observer.quantized``); called where there are any."""
        if is_tracing() or is_legacy_batched(values):
            return
        values, operand = _outside_transforms(values), _outside_transforms(operand)
        with torch.no_grad():
            for see in self.observers.quantized:
                see(self.name, kind, values, operand, self.backend)


def _outside_transforms(operand: Any) -> Any:
    operand = outside_transforms(operand)
    return operand.detach() if isinstance(operand, Tensor) else operand


class LowPrecisionLinear(nn.Linear):
    """``nn.Linear`` with the GEMMs of a ``GemmPlan``. Conversion makes it of an ``nn.Linear``.

    Input [..., in_features] of any float dtype, output [..., out_features] in the plan's half dtype under autocast,
    else in the input's dtype. The weight may be FP32, half, or a ``Fp8Weight``.
    """

    gemm_plan: GemmPlan

    def forward(self, input: Tensor) -> Tensor:
        return apply_plan(input, self.weight, self.bias, self.gemm_plan, self.training)

    def extra_repr(self) -> str:
        plan = self.gemm_plan
        kind = plan.recipe.scaling if plan.recipe is not None else "half"
        return f"{super().extra_repr()}, {kind}, backend={plan.backend.name}"


class LowPrecisionConv1D(LowPrecisionLinear):
    """``LowPrecisionLinear`` for transformers' ``Conv1D`` (GPT-2), whose weight is [in_features, out_features]."""

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return apply_plan(x, self.weight, self.bias, self.gemm_plan, self.training, transposed=True)


class AutocastOff:
    """``torch.autocast(device, enabled=False)`` at half the host time, for code that is not compiled."""

    __slots__ = ("device", "was")

    def __init__(self, device: str) -> None:
        self.device = device

    def __enter__(self) -> None:
        self.was = torch.is_autocast_enabled(self.device)
        if self.was:
            torch.set_autocast_enabled(self.device, False)

    def __exit__(self, *_: Any) -> None:
        if self.was:
            torch.set_autocast_enabled(self.device, True)


@torch.compiler.disable
def apply_plan(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    plan: GemmPlan,
    record: bool,
    transposed: bool = False,
    part: tuple[int, int] | None = None,
) -> Tensor:
    """A linear layer [..., in_features] to [..., out_features] by ``plan``.

    Args:
        record: whether amaxes enter the histories: whenever the layer trains, also in the no-grad first pass of
            reentrant checkpointing.
        transposed: whether ``weight`` is [in_features, out_features].
        part: (first row, row behind the last) of the weight to multiply with; None for all rows.
    """
    device = x.device.type
    out_dtype = x.dtype
    if torch.is_autocast_enabled(device):
        out_dtype = torch.get_autocast_dtype(device)
        if out_dtype != plan.half:  # the user's own loop has chosen another dtype
            plan = replace(plan, half=out_dtype)
    if is_transformed():
        return _by_torch(x, weight, bias, plan, out_dtype, transposed, part)
    if x.numel() == 0:  # no kernel takes an operand without elements
        out = _by_torch(x, weight, bias, replace(plan, observers=NOBODY), out_dtype, transposed, part)
        return _not_a_view(out, out.shape)
    with AutocastOff(device):
        flat = x.reshape(-1, x.shape[-1])
        # needs_input_grad does not know of no_grad.
        grad = torch.is_grad_enabled()
        gradient = handle = None
        if grad and x.requires_grad and plan.recipe is not None:
            gradient, handle = plan.inputs.gradient(x)
        gives_out = gradient is not None and handle is None
        call = _Call(plan, x, flat.detach(), out_dtype, record, transposed, grad, gradient, gives_out, part)
        out, given_out = _LinearFunction.apply(flat if handle is None else handle, weight, bias, call)
        if gradient is not None and given_out is not None:
            plan.inputs.give_out(x, gradient, given_out)
        return out if x.dim() == 2 else _not_a_view(out, [*x.shape[:-1], out.shape[-1]])


def _not_a_view(out: Tensor, shape: Sequence[int]) -> Tensor:
    """``out`` in ``shape``. FSDP2 hooks into the output of a block: of a view, an in-place operation loses the hook."""
    return torch.ops.aten._unsafe_view.default(out, shape)


def _by_torch(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    plan: GemmPlan,
    out_dtype: torch.dtype,
    transposed: bool,
    part: tuple[int, int] | None,
) -> Tensor:
    """The layer in half precision, by operations of torch alone."""
    if is_tracing() and isinstance(weight, QuantizedTensor):
        warnings.warn(
            "torch.jit.save crashes on weights in low-bit storage. To save a trace, make it of copy.deepcopy(model), "
            "whose weights are FP32.",
            stacklevel=2,
        )
    with AutocastOff(x.device.type):
        rows = plan.in_half("input", x.reshape(-1, x.shape[-1]))
        half = weight.to(plan.half).t() if transposed else weight.to(plan.half)
        half = plan.in_half("weight", half if part is None else half[slice(*part)])
        out = plan.backend.matmul(rows, half.t(), plan.half).to(out_dtype)
        out = out if bias is None else out + bias.to(out_dtype)
        return out.reshape(*x.shape[:-1], out.shape[1])


def wgrad_dtype(weight: Tensor) -> torch.dtype:
    """Dtype in which autograd will store this weight's gradient (``grad_dtype`` where it was set)."""
    return (weight.grad_dtype if weight.is_leaf else None) or weight.dtype


@dataclass
class _Call:
    """Arguments of one forward pass that are no tensors of the graph.

    Attributes:
        source: the input that the layer was called with, [..., in_features].
        values: the same values as [rows, in_features], detached.
        grad: whether autograd is on.
        gradient: the sum of the input's gradient; None for an input without a gradient and for half layers.
        gives_out: whether this is the first layer to read the input, which gives out the handle.
    """

    plan: GemmPlan
    source: Tensor
    values: Tensor
    out_dtype: torch.dtype
    record: bool
    transposed: bool
    grad: bool
    gradient: InputGradient | None
    gives_out: bool
    part: tuple[int, int] | None


class _LinearFunction(torch.autograd.Function):
    """(the input or its handle, weight, bias, call) to (output, the handle where this layer gives it out)."""

    @staticmethod
    def forward(ctx: Any, source, weight, bias, call: _Call):
        ctx.set_materialize_grads(False)
        ctx.weight, ctx.version = weight, None if weight.is_inference() else weight._version
        x = call.values
        plan, out_dtype, record, transposed, grad = call.plan, call.out_dtype, call.record, call.transposed, call.grad
        backend = plan.backend
        fprop8, dgrad8, wgrad8 = plan.fp8
        if (fprop8 or dgrad8) and isinstance(scale := plan.operands["weight"].slot, WeightScale):
            scale.follow(weight, record)  # before the input is quantized, whose history may end here
        is_stored = isinstance(weight, Fp8Weight | Fp16Weight)
        if transposed:
            weight = weight.transposed() if is_stored else weight.t()
        all_rows = weight.shape[0]
        if call.part is not None:
            weight = weight.rows(*call.part) if is_stored else weight[slice(*call.part)]
        need_dgrad = grad and ctx.needs_input_grad[0]
        need_wgrad = grad and ctx.needs_input_grad[1]
        rows = x.shape[0]
        pad = -rows % backend.row_multiple if any(plan.fp8) else 0
        xp = F.pad(x, (0, 0, 0, pad)) if pad else x

        x8 = w8 = None
        x_columnwise, w_columnwise = need_wgrad and wgrad8, need_dgrad and dgrad8
        if fprop8 or x_columnwise:
            values = _compute_dtype(xp, plan)
            x8 = plan.inputs.quantize(
                backend, call.source, values, plan.operands["input"],
                rowwise=fprop8, columnwise=x_columnwise, record=record,
            )  # fmt: skip
            if plan.observers.quantized:
                plan.announce("input", values, x8)
        # A weight that is stored in FP8 is transposed again in backward, which takes less memory than two orientations.
        w_kept = w_columnwise and plan.keeps_weight and not isinstance(weight, Fp8Weight)
        if fprop8 or w_kept:
            w8 = _weight_operand(weight, plan, rowwise=fprop8, columnwise=w_kept)

        if fprop8:
            out = backend.fprop(x8, w8, bias, out_dtype)
            if pad:  # not a view, so that in-place operations on the output work
                out = torch.ops.aten._unsafe_view.default(out[:rows], [rows, out.shape[1]])
        else:
            out = backend.matmul(plan.in_half("input", x), plan.in_half("weight", weight).t(), out_dtype)
            out = out if bias is None else out + bias.to(out_dtype)

        x_tensors: list[Tensor | None] = []
        x_meta: Any = None
        if x_columnwise:
            x_tensors, x_meta = backend.save(x8)
        elif need_wgrad:
            x_tensors = [source if call.gradient is None else x]
        w_tensors: list[Tensor | None] = []
        w_meta: Any = None
        if w_kept:
            w_tensors, w_meta = backend.save(w8)
        elif need_dgrad:
            w_tensors = [weight]
        handle = x.new_empty(0) if call.gives_out else None
        # The link: a second derivative reaches the input through it; it holds no values.
        link = [handle if call.gives_out else source] if need_wgrad and call.gradient is not None else []
        ctx.save_for_backward(*x_tensors, *w_tensors, *link)
        ctx.splits = len(x_tensors), len(x_tensors) + len(w_tensors)
        ctx.metas = (x_meta, w_meta)
        ctx.plan, ctx.record, ctx.rows, ctx.pad, ctx.transposed = plan, record, rows, pad, transposed
        ctx.x_dtype, ctx.grad_dtype = x.dtype, wgrad_dtype(ctx.weight)
        ctx.bias_dtype = None if bias is None else bias.dtype
        ctx.gradient, ctx.gives_out = call.gradient, call.gives_out
        ctx.part, ctx.all_rows = call.part, all_rows
        return out, handle

    @staticmethod
    def backward(ctx: Any, grad_output, _):
        if grad_output is None:  # this layer's output is no part of the loss; other readers of its input may be
            total = ctx.gradient.take() if ctx.gives_out else None
            return None if total is None else total[: ctx.rows], None, None, None
        with AutocastOff(grad_output.device.type):  # a loop may call backward() under autocast
            # No kernel quantizes a batch of gradients (``is_grads_batched``, ``vmap``).
            if torch.is_grad_enabled() or is_batched(grad_output) or is_legacy_batched(grad_output):
                return differentiable_backward(ctx, grad_output)
            return _LinearFunction._backward(ctx, grad_output)

    @staticmethod
    def _backward(ctx: Any, grad_output):
        plan: GemmPlan = ctx.plan
        backend = plan.backend
        _, dgrad8, wgrad8 = plan.fp8
        need_dgrad, need_wgrad, need_bias = ctx.needs_input_grad[:3]
        saved = ctx.saved_tensors
        x_end, w_end = ctx.splits
        x_saved, w_saved = list(saved[:x_end]), list(saved[x_end:w_end])
        x_meta, w_meta = ctx.metas

        dy = grad_output
        rowwise, columnwise = need_dgrad and dgrad8, need_wgrad and wgrad8
        dy8: Any = None
        dy_half: Any = None
        if rowwise or columnwise:
            values = _compute_dtype(F.pad(dy, (0, 0, 0, ctx.pad)) if ctx.pad else dy, plan)
            dy8 = backend.quantize(
                values, plan.operands["grad_output"], rowwise=rowwise, columnwise=columnwise, record=ctx.record
            )
            if plan.observers.quantized:
                plan.announce("grad_output", values, dy8)
        if (need_dgrad and not dgrad8) or (need_wgrad and not wgrad8):
            dy_half = plan.in_half("grad_output", dy)

        dx = dw = db = None
        if need_dgrad:
            shared = None if ctx.gives_out else ctx.gradient
            total = None if ctx.gradient is None else ctx.gradient.take()
            if dgrad8:
                if w_meta is not None:
                    w8 = backend.restore(w_saved, w_meta)
                else:
                    w8 = _weight_operand(w_saved[0], plan, rowwise=False, columnwise=True)
                dx = backend.dgrad(dy8, w8, ctx.x_dtype, total)
            else:
                dx = backend.matmul(dy_half, plan.in_half("weight", w_saved[0]), ctx.x_dtype)
                dx = dx if total is None else dx.add_(total[: ctx.rows])
            if shared is not None:
                shared.put(dx)
                dx = None
            elif ctx.pad:
                dx = dx[: ctx.rows]
        if need_wgrad:
            if wgrad8:
                dw = backend.wgrad(dy8, backend.restore(x_saved, x_meta), ctx.grad_dtype)
            else:
                dw = backend.matmul(dy_half.t(), plan.in_half("input", x_saved[0]), ctx.grad_dtype)
            dw = dw.t() if ctx.transposed else dw
            if ctx.part is not None:
                dw = among_rows(dw, ctx.part, ctx.all_rows)
        if ctx.bias_dtype is not None and need_bias:
            db = dy.sum(0, dtype=torch.float32).to(ctx.bias_dtype)
        return dx, dw, db, None


def _compute_dtype(values: Tensor, plan: GemmPlan) -> Tensor:
    """``values`` in the plan's half dtype, from which activations and their gradients are quantized."""
    return values if values.dtype == plan.half else values.to(plan.half)


def _weight_operand(weight: Tensor, plan: GemmPlan, *, rowwise: bool, columnwise: bool) -> Any:
    backend, operand = plan.backend, plan.operands["weight"]
    if isinstance(weight, Fp8Weight):
        w8 = backend.from_storage(weight, rowwise=rowwise, columnwise=columnwise)
    else:
        w8 = backend.quantize(stored_data(weight), operand, rowwise=rowwise, columnwise=columnwise, record=False)
    if plan.observers.quantized:
        plan.announce("weight", weight, w8)
    return w8

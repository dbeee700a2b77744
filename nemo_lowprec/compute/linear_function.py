"""The passes of a converted linear layer.

forward   quantize the input [M, K] (``SharedInput``) and the weight [N, K], ``backend.fprop``; save the columnwise data
          (of an input that its producer can compute again, what the producer keeps: ``again.py``)
backward  quantize the output gradient [M, N], ``backend.dgrad`` adds to the input's gradient, ``backend.wgrad``
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from nemo_lowprec.compat.autograd import is_batched, is_legacy_batched
from nemo_lowprec.compute.again import Again, again_of
from nemo_lowprec.compute.autocast import AutocastOff
from nemo_lowprec.compute.backends.base import Backend
from nemo_lowprec.compute.double_backward import among_rows, differentiable_backward
from nemo_lowprec.compute.gemm_plan import GemmPlan
from nemo_lowprec.compute.producers import computed, offered
from nemo_lowprec.compute.shared_input import no_values
from nemo_lowprec.compute.weight_state import WeightState
from nemo_lowprec.tensors import Fp8Weight, Fp16Weight, stored_data
from nemo_lowprec.tensors.gradient import computed_dtype, gradient_dtype

_GRAD_BUFFER = "_lowprec_grad_buffer"  # on a weight: (memory for its gradient, number of layers that read the weight)
_JOINT_BUFFER = "_lowprec_joint_buffer"  # on the first of the weights of a ``LayerGroup``: their memory as one


def give_grad_buffer(weight: Tensor) -> Tensor:
    """Memory for the gradient of ``weight``, of its shape and strides, into which the weight's layer will write it.

    A caller still compares addresses: only a layer that alone reads the weight writes there.
    """
    stored = stored_data(weight)
    buffer = torch.empty_strided(stored.shape, stored.stride(), dtype=computed_dtype(weight), device=stored.device)
    weight.__dict__[_GRAD_BUFFER] = buffer, 0
    return buffer


def give_grad_buffers(weights: Sequence[Tensor]) -> list[Tensor]:
    """``give_grad_buffer`` for weights [out_features, in_features] of one dtype, below each other in one memory."""
    ins, dtype = stored_data(weights[0]).shape[1], computed_dtype(weights[0])
    heights = [len(weight) for weight in weights]
    joint = torch.empty(sum(heights), ins, dtype=dtype, device=weights[0].device)
    buffers = list(joint.split(heights))
    for weight, buffer in zip(weights, buffers, strict=True):
        weight.__dict__[_GRAD_BUFFER] = buffer, 0
    weights[0].__dict__[_JOINT_BUFFER] = joint
    return buffers


def read_grad_buffer(weight: Tensor) -> None:
    """Note that a layer reads ``weight``, and will write its gradient."""
    if _GRAD_BUFFER in weight.__dict__:
        buffer, readers = weight.__dict__[_GRAD_BUFFER]
        weight.__dict__[_GRAD_BUFFER] = buffer, readers + 1


def grad_buffer_of(weight: Tensor) -> Tensor | None:
    """Where backward shall write the gradient of ``weight``; None for new memory."""
    buffer, readers = weight.__dict__.get(_GRAD_BUFFER, (None, 0))
    return buffer if readers == 1 else None


def _grad_buffer(ctx: Any) -> Tensor | None:
    whole = ctx.part is None and not ctx.transposed and ctx.weight.dim() == 2
    return grad_buffer_of(ctx.weight) if whole else None


def grad_buffers_of(weights: Sequence[Tensor]) -> Tensor | None:
    """Where backward shall write the gradients of ``weights``, as one; None for new memory."""
    joint: Tensor | None = weights[0].__dict__.get(_JOINT_BUFFER)
    alone = all(weight.__dict__.get(_GRAD_BUFFER, (None, 0))[1] == 1 for weight in weights)
    return joint if joint is not None and alone and len(joint) == sum(map(len, weights)) else None


def not_a_view(out: Tensor, shape: Sequence[int]) -> Tensor:
    """``out`` in ``shape``. FSDP2 hooks into the output of a block: of a view, an in-place operation loses the hook."""
    return torch.ops.aten._unsafe_view.default(out, shape)


class LinearFunction(torch.autograd.Function):
    """(the input or its handle, weight, bias, call) to (output, the handle where this layer gives it out).

    ``call``, a tuple of what is no part of the graph:
        plan: how the layer computes.
        x: the input [..., in_features].
        gradient: the ``InputGradient`` that sums the input's gradient; None for an input without a gradient and for
            layers in half precision.
        gives_out: whether this layer is the first one that reads the input, and gives out the handle.
        out_dtype: dtype of the output.
        record, transposed, part: as ``linear`` has them.
        grad: whether autograd is on.
    """

    @staticmethod
    def forward(ctx: Any, source, weight, bias, call):
        ctx.set_materialize_grads(False)
        plan, x, gradient, gives_out, out_dtype, record, transposed, part, grad = call
        ctx.weight, ctx.version = weight, None if weight.is_inference() else weight._version
        backend, operands = plan.backend, plan.operands
        fprop8, dgrad8, wgrad8 = plan.fp8
        if plan.weight is not None:
            plan.weight.follow(weight, record)  # before the input is quantized, whose history may end here
        is_stored = isinstance(weight, Fp8Weight | Fp16Weight)
        if transposed:
            weight = weight.transposed() if is_stored else weight.t()
        if weight.dim() > 2:  # of a convolution
            weight = weight.matrix() if is_stored else weight.flatten(1)
        all_rows = weight.shape[0]
        if part is not None:
            weight = weight.rows(*part) if is_stored else weight[slice(*part)]
        needs = ctx.needs_input_grad
        need_dgrad, need_wgrad = grad and needs[0], grad and needs[1]
        shape = x.shape
        values = x if len(shape) == 2 else x.reshape(-1, shape[-1])
        rows = values.shape[0]
        pad = -rows % backend.row_multiple if plan.any_fp8 else 0

        x8 = w8 = None
        x_columnwise, w_columnwise = need_wgrad and wgrad8, need_dgrad and dgrad8
        again = again_of(x, plan.inputs.again) if x_columnwise and fprop8 else None
        x_columnwise = x_columnwise and again is None
        if fprop8 or x_columnwise:
            padded = F.pad(values, (0, 0, 0, pad)) if pad else values
            if padded.dtype != plan.half:
                padded = padded.to(plan.half)
            x8 = plan.inputs.quantize(
                backend, x, padded, operands["input"], rowwise=fprop8, columnwise=x_columnwise, record=record
            )
            if plan.observers.quantized:
                plan.announce("input", padded, x8)
        # A weight that is stored in FP8 is transposed again in backward, which takes less memory than two orientations.
        # A weight that is an inference tensor has no version, and may be written without a trace.
        keeps = plan.weight is not None and part is None and ctx.version is not None and plan.weight.keeps
        keeper = plan.weight if keeps else None
        if keeper is not None and not plan.any_fp8:
            weight = _half_weight(weight, plan, keeper, transposed)
        w_kept = w_columnwise and plan.keeps_weight and (keeper is not None or not isinstance(weight, Fp8Weight))
        if fprop8 or w_kept:
            w8 = _operand_of(weight, plan, keeper, rowwise=fprop8, columnwise=w_kept, transposed=transposed)

        if fprop8:
            out = backend.fprop(x8, w8, bias, out_dtype)
            if pad:
                out = out[:rows]
        else:
            x_half, w_half = plan.in_half("input", values), plan.in_half("weight", weight)
            if plan.by_torch and out_dtype == plan.half:
                out = F.linear(x_half, w_half, bias if bias is None else bias.to(out_dtype))
            else:
                out = backend.matmul(x_half, w_half.t(), out_dtype)
                out = out if bias is None else out + bias.to(out_dtype)
        if pad or len(shape) != 2:
            out = not_a_view(out, [*shape[:-1], out.shape[1]])

        x_tensors: list[Tensor | None] = []
        x_meta: Any = None
        if again is not None or x_columnwise:
            x_tensors, x_meta = input_to_save(backend, x8, again)
        elif need_wgrad:
            x_tensors = [source if gradient is None else values.detach()]
        w_tensors: list[Tensor | None] = []
        w_meta: Any = None
        if w_kept:
            w_tensors, w_meta = backend.save(w8 if keeper is None else backend.copy_operand(w8))
        elif need_dgrad:
            w_tensors = [weight]
        handle = no_values(x) if gives_out else None
        if need_wgrad and gradient is not None:
            # The link: a second derivative reaches the input through it; it holds no values.
            ctx.save_for_backward(*x_tensors, *w_tensors, handle if gives_out else source)
        else:
            ctx.save_for_backward(*x_tensors, *w_tensors)
        ctx.splits = len(x_tensors), len(x_tensors) + len(w_tensors)
        ctx.metas = x_meta, w_meta
        ctx.plan, ctx.record, ctx.transposed = plan, record, transposed
        ctx.shape, ctx.rows, ctx.pad = shape, rows, pad
        ctx.x_dtype, ctx.grad_dtype = x.dtype, gradient_dtype(ctx.weight)
        ctx.bias_dtype = None if bias is None else bias.dtype
        ctx.gradient, ctx.gives_out = gradient, gives_out
        read_grad_buffer(ctx.weight)
        ctx.part, ctx.all_rows = part, all_rows
        return out, handle

    @staticmethod
    def backward(ctx: Any, grad_output, _):
        if grad_output is None:  # this layer's output is no part of the loss; other readers of its input may be
            total = ctx.gradient.take() if ctx.gives_out else None
            dx, dw, db = None if total is None else total[: ctx.rows], None, None
        else:
            dy = grad_output if len(ctx.shape) == 2 else grad_output.reshape(-1, grad_output.shape[-1])
            # No kernel quantizes a batch of gradients (``is_grads_batched``, ``vmap``).
            again = torch.is_grad_enabled() or is_batched(grad_output) or is_legacy_batched(grad_output)
            there = None if again or not ctx.plan.any_fp8 else offered(grad_output, ctx.plan.operands["grad_output"])
            if there is None:
                computed(grad_output)
            device = "cuda" if dy.is_cuda else dy.device.type
            # A loop may call backward() under autocast.
            with AutocastOff(device):
                dx, dw, db = differentiable_backward(ctx, dy) if again else _backward(ctx, dy, there)
        if dx is not None and len(ctx.shape) != 2:
            dx = dx.reshape(ctx.shape)
        return dx, dw, db, None


def _backward(
    ctx: Any, dy: Tensor, there: tuple[Any, Tensor | None] | None
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """The gradients of (input [rows, in_features], weight, bias) for ``dy`` [rows, out_features].

    Args:
        there: ``dy`` quantized and the sums of its columns, where a producer has offered them.
    """
    plan: GemmPlan = ctx.plan
    backend = plan.backend
    _, dgrad8, wgrad8 = plan.fp8
    need_dgrad, need_wgrad, need_bias = ctx.needs_input_grad[:3]
    saved, (x_end, w_end) = ctx.saved_tensors, ctx.splits
    w_meta = ctx.metas[1]

    rowwise, columnwise = need_dgrad and dgrad8, need_wgrad and wgrad8
    need_sums = ctx.bias_dtype is not None and need_bias
    dy8: Any = None
    dy_half: Any = None
    sums: Tensor | None = None
    if there is not None:
        dy8, sums = there
        if plan.observers.quantized:
            plan.announce("grad_output", dy, dy8)
    elif rowwise or columnwise:
        values = F.pad(dy, (0, 0, 0, ctx.pad)) if ctx.pad else dy
        if values.dtype != plan.half:
            values = values.to(plan.half)
        dy8, sums = backend.quantize_grad(
            values, plan.operands["grad_output"], rowwise=rowwise, columnwise=columnwise, record=ctx.record,
            sums=need_sums and dy.dtype == plan.half,
        )  # fmt: skip
        if plan.observers.quantized:
            plan.announce("grad_output", values, dy8)
    if (need_dgrad and not dgrad8) or (need_wgrad and not wgrad8):
        dy_half = plan.in_half("grad_output", dy)

    dx = dw = db = None
    if need_dgrad:
        total = None if ctx.gradient is None else ctx.gradient.take()
        if dgrad8:
            if w_meta is not None:
                w8 = backend.restore(saved[x_end:w_end], w_meta)
            else:
                w8 = new_weight_operand(saved[x_end], plan, rowwise=False, columnwise=True)
            dx = backend.dgrad(dy8, w8, ctx.x_dtype, total)
        else:
            dx = backend.matmul(dy_half, plan.in_half("weight", saved[x_end]), ctx.x_dtype)
            dx = dx if total is None else dx.add_(total[: ctx.rows])
        if ctx.gradient is not None and not ctx.gives_out:
            ctx.gradient.put(dx)
            dx = None
        elif ctx.pad:
            dx = dx[: ctx.rows]
        if ctx.gives_out and len(ctx.gradient.readers) > 1:
            plan.inputs.see(ctx.gradient.readers)
    if need_wgrad:
        if wgrad8:
            dw = backend.wgrad(dy8, columnwise_input(ctx, saved[:x_end]), computed_dtype(ctx.weight), _grad_buffer(ctx))
        else:
            x = saved[0].reshape(-1, ctx.shape[-1])
            dw = backend.matmul(dy_half.t(), plan.in_half("input", x), computed_dtype(ctx.weight))
        dw = dw.t() if ctx.transposed else dw
        if ctx.part is not None:
            dw = among_rows(dw, ctx.part, ctx.all_rows)
        dw = dw if ctx.weight.dim() == 2 else dw.view(ctx.weight.shape)
    if need_sums:
        db = (dy.sum(0, dtype=torch.float32) if sums is None else sums).to(ctx.bias_dtype)
    return dx, dw, db


def input_to_save(backend: Backend, x8: Any, again: tuple[Again, Sequence[Tensor]] | None) -> tuple[list[Any], Any]:
    """The tensors of an input that forward saves for the wgrad GEMM, and their description for ``columnwise_input``.

    Args:
        x8: the quantized input; with ``again`` it is not saved.
        again: how backward computes the input again, from ``again_of``.
    """
    if again is None:
        return backend.save(x8)
    compute, tensors = again
    compute.readers += 1
    return list(tensors), compute


def columnwise_input(ctx: Any, tensors: Sequence[Tensor]) -> Any:
    """The quantized input of a layer or group for the wgrad GEMM, from the tensors that forward has saved."""
    plan, meta = ctx.plan, ctx.metas[0]
    if not isinstance(meta, Again):
        return plan.backend.restore(tensors, meta)
    source = meta.values(tensors)
    values = source.reshape(-1, ctx.shape[-1])
    values = F.pad(values, (0, 0, 0, ctx.pad)) if ctx.pad else values
    # All readers of ``source`` share the operand, as in forward.
    return plan.inputs.quantize(
        plan.backend, source, values.to(plan.half), plan.operands["input"], rowwise=False, columnwise=True, record=False
    )


def _half_weight(weight: Tensor, plan: GemmPlan, keeper: WeightState, transposed: bool) -> Tensor:
    """``weight`` in half precision, made once a step."""
    half: Tensor | None = keeper.kept(True, True)
    if half is None or half.dtype != plan.half:
        with torch.inference_mode(False), torch.no_grad():  # a later pass may save it for backward
            half = plan.in_half("weight", weight)
        keeper.keep(half, True, True, transposed)
    return half


def weight_operand(matrix: Tensor, weight: Tensor, plan: GemmPlan, *, rowwise: bool, columnwise: bool) -> Any:
    """The quantized ``weight``, kept from step to step where the plan says so.

    Args:
        matrix: the weight as a matrix in its storage.
    """
    keeps = plan.weight is not None and not weight.is_inference() and plan.weight.keeps
    keeper = plan.weight if keeps else None
    return _operand_of(matrix, plan, keeper, rowwise=rowwise, columnwise=columnwise, transposed=False)


def _operand_of(
    weight: Tensor, plan: GemmPlan, keeper: WeightState | None, *, rowwise: bool, columnwise: bool, transposed: bool
) -> Any:
    """The quantized ``weight``: what ``keeper`` keeps of it, if that is there, else made anew, and kept."""
    w8 = None if keeper is None else keeper.kept(rowwise, columnwise)
    if w8 is not None:
        if plan.observers.quantized:
            plan.announce("weight", weight, w8)
        return w8
    if keeper is None:
        return new_weight_operand(weight, plan, rowwise=rowwise, columnwise=columnwise)
    with torch.inference_mode(False), torch.no_grad():  # a later pass may save it for backward
        w8 = new_weight_operand(weight, plan, rowwise=rowwise, columnwise=columnwise)
    keeper.keep(w8, rowwise, columnwise, transposed)
    return w8


def new_weight_operand(weight: Tensor, plan: GemmPlan, *, rowwise: bool, columnwise: bool) -> Any:
    """The quantized ``weight`` [out_features, in_features], made anew."""
    backend, operand = plan.backend, plan.operands["weight"]
    if isinstance(weight, Fp8Weight):
        w8 = backend.from_storage(weight, rowwise=rowwise, columnwise=columnwise)
    else:
        w8 = backend.quantize(stored_data(weight), operand, rowwise=rowwise, columnwise=columnwise, record=False)
    if plan.observers.quantized:
        plan.announce("weight", weight, w8)
    return w8

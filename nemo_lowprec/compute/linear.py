"""The converted linear layer: an ``nn.Linear`` whose three GEMMs run at the level's precision.

The layer's ``GemmPlan`` says which of the GEMMs run in FP8, on which backend and with which operands. The passes are in
``linear_function.py``, formats and scales of the operands in ``operands.py``, the GEMMs in ``backends/``.
"""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Self

import torch
from torch import Tensor, nn

from nemo_lowprec.compat.autograd import apply_function, is_tracing, unwrap_if_dead
from nemo_lowprec.compute.autocast import AutocastOff
from nemo_lowprec.compute.backends.base import is_transformed
from nemo_lowprec.compute.compiled import has_own_weight, read_parameter, read_storage, sink_of, traced_plan
from nemo_lowprec.compute.flat_linear import flat_call
from nemo_lowprec.compute.gemm_plan import GemmPlan
from nemo_lowprec.compute.graph_entry import GraphParameter
from nemo_lowprec.compute.half_linear import compiled_half_linear, half_linear
from nemo_lowprec.compute.linear_function import LinearFunction, not_a_view
from nemo_lowprec.compute.producers import GradReader
from nemo_lowprec.compute.residual import as_branch
from nemo_lowprec.observers import NOBODY
from nemo_lowprec.tensors import QuantizedTensor

_apply = apply_function(LinearFunction)


_ALL = (True, True, True)  # GEMMs in FP8


class LowPrecisionLinear(nn.Linear):
    """``nn.Linear`` with the GEMMs of a ``GemmPlan``. Conversion makes it of an ``nn.Linear``.

    Input [..., in_features] of any float dtype, output [..., out_features] in the plan's half dtype under autocast,
    else in the input's dtype. The weight may be FP32, half, or a ``Fp8Weight``.
    """

    gemm_plan: GemmPlan

    def forward(self, input: Tensor) -> Tensor:
        if torch.compiler.is_compiling():
            return _compiled_layer(self, input, False)
        plan = self.gemm_plan
        if plan.group is not None and (of_group := plan.group.output(self, plan, input)) is not None:
            return of_group  # type: ignore[no-any-return]
        out = linear(input, self.weight, self.bias, plan, self.training, False, None)
        return as_branch(out, plan) if plan.ends_branch else out

    def train(self, mode: bool = True) -> Self:
        if not mode and self.gemm_plan.weight is not None:
            self.gemm_plan.weight.look_again()
        return super().train(mode)

    def extra_repr(self) -> str:
        plan = self.gemm_plan
        kind = plan.recipe.scaling if plan.recipe is not None else "half"
        return f"{super().extra_repr()}, {kind}, backend={plan.backend.name}"


class LowPrecisionConv1D(LowPrecisionLinear):
    """``LowPrecisionLinear`` for transformers' ``Conv1D`` (GPT-2), whose weight is [in_features, out_features]."""

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        if torch.compiler.is_compiling():
            return _compiled_layer(self, x, True)
        plan = self.gemm_plan
        out = linear(x, self.weight, self.bias, plan, self.training, True, None)
        return as_branch(out, plan) if plan.ends_branch else out


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    plan: GemmPlan,
    record: bool,
    transposed: bool,
    part: tuple[int, int] | None,
) -> Tensor:
    """A linear layer [..., in_features] to [..., out_features] by ``plan``.

    Args:
        weight: [out_features, ...], of in_features elements a row: a convolution's weight has more dimensions than two.
        record: whether amaxes enter the histories: whenever the layer trains, also in the no-grad first pass of
            reentrant checkpointing.
        transposed: whether ``weight`` is [in_features, out_features].
        part: (first row, row behind the last) of the weight to multiply with; None for all rows.
    """
    device = "cuda" if x.is_cuda else x.device.type
    out_dtype = x.dtype
    under_autocast = torch.is_autocast_enabled(device)
    if under_autocast:
        out_dtype = torch.get_autocast_dtype(device)
        if out_dtype != plan.half:  # the user's own loop has chosen another dtype
            plan = replace(plan, half=out_dtype)
    if plan.calls is not None and record and torch.is_grad_enabled() and x.numel():
        outs = weight.shape[1] if transposed else weight.shape[0] if part is None else part[1] - part[0]
        plan.calls.see(plan.name, x, outs, weight.requires_grad)
    fits = under_autocast or x.dtype == weight.dtype
    if plan.by_torch and fits and not transposed and not isinstance(weight, QuantizedTensor):
        return half_linear(x, weight, bias, part, plan)
    if is_transformed():
        return _by_torch(x, weight, bias, plan, out_dtype, transposed, part)
    if not x.numel():  # no kernel takes an operand without elements
        out = _by_torch(x, weight, bias, replace(plan, observers=NOBODY), out_dtype, transposed, part)
        return not_a_view(out, out.shape)
    x, weight = unwrap_if_dead(x), unwrap_if_dead(weight)
    source, gradient, gives_out = x, None, False
    grad = torch.is_grad_enabled()  # ctx.needs_input_grad does not know of no_grad
    if plan.is_flat and record and grad and not transposed and part is None and weight.dim() == 2:
        flat = flat_call(x, weight, bias, plan, out_dtype)
        if flat is not None:
            return flat
    if grad and plan.recipe is not None and x.requires_grad:
        gradient, handle = plan.inputs.gradient(x)
        gradient.readers.append(plan)
        gives_out = handle is None
        source = x if handle is None else handle
    # x travels in a tuple: where the source is a handle, autograd must not see x.
    call = plan, x, gradient, gives_out, out_dtype, record, transposed, part, grad
    if not under_autocast or plan.ignores_autocast:
        out, given_out = _apply(source, weight, bias, call)
    else:
        with AutocastOff(device):
            out, given_out = _apply(source, weight, bias, call)
    if given_out is not None:
        plan.inputs.give_out(x, gradient, given_out)  # type: ignore[arg-type]
    if grad and plan.fp8 == _ALL and plan.operands["grad_output"].slot is not None:
        GradReader.add(
            plan, out, x.requires_grad, weight.requires_grad, bias is not None and bias.requires_grad, record
        )
    return out


@torch.compiler.disable
def _uncompiled_layer(layer: LowPrecisionLinear, x: Tensor, transposed: bool) -> Tensor:
    return linear(x, layer.weight, layer.bias, layer.gemm_plan, layer.training, transposed, None)


def _compiled_layer(layer: LowPrecisionLinear, x: Tensor, transposed: bool) -> Tensor:
    entry = layer.gemm_plan.entry
    if entry is None or not (entry.prepare() and has_own_weight(layer, "weight", entry)):
        return _uncompiled_layer(layer, x, transposed)  # type: ignore[no-any-return]
    bias = read_parameter(layer, "bias", entry.bias)
    return compiled_linear(x, layer, "weight", bias, layer.gemm_plan, transposed, None)


def compiled_linear(
    x: Tensor,
    layer: nn.Module,
    name: str,
    bias: Tensor | None,
    plan: GemmPlan,
    transposed: bool,
    part: tuple[int, int] | None,
) -> Tensor:
    """``linear`` in the code that ``torch.compile`` traces: one call into the graph, by the weight ``name``."""
    if plan.by_torch and not transposed:
        return compiled_half_linear(x, layer, name, bias, plan, False, part)
    entry = plan.entry
    own: GraphParameter = entry.weight
    weight = getattr(layer, name) if own.data is None else sink_of(own)
    alone = x.is_leaf and x.requires_grad
    return _in_graph(
        x, weight, own.data, own.scale_inv, own.dtype, bias, entry.tag, entry.model, entry.signature, layer.training,
        transposed, part, alone,
    )  # type: ignore[no-any-return]  # fmt: skip


@torch.compiler.allow_in_graph
def _in_graph(
    x: Tensor,
    weight: Tensor | None,
    data: Tensor | None,
    scale_inv: Tensor | None,
    dtype: torch.dtype,
    bias: Tensor | None,
    tag: Tensor,
    model: Tensor,
    signature: str,
    record: bool,
    transposed: bool,
    part: tuple[int, int] | None,
    alone: bool,
) -> Tensor:
    """``linear`` while the compiler records what it does; ``GraphEntry`` has the arguments.

    Args:
        weight: the weight, or the sink of its gradient; None for no gradient.
        data, scale_inv, dtype: the weight's storage, and what it reads as, where ``weight`` is not the weight.
        alone: whether the layer must not share its input, which may change without a trace.
    """
    if data is None:
        assert weight is not None
        values, storage = weight, [weight]
    else:
        storage = [data] if scale_inv is None else [data, scale_inv]
        # Where the gradient is FP32 the weight reads as FP32, so that the gradient is not rounded.
        wide = torch.float32 if weight is None else torch.promote_types(dtype, weight.dtype)
        values = read_storage(weight, data, scale_inv, wide)
    if values.dim() > 2:  # a convolution's
        storage[0] = storage[0].detach().flatten(1)
    plan = traced_plan(tag, model, signature, storage, record, transposed, alone)
    return linear(x, values, bias, plan, record, transposed, part)


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
        half = half if half.dim() == 2 else half.flatten(1)
        half = plan.in_half("weight", half if part is None else half[slice(*part)])
        out = plan.backend.matmul(rows, half.t(), plan.half).to(out_dtype)
        out = out if bias is None else out + bias.to(out_dtype)
        return out.reshape(*x.shape[:-1], out.shape[1])

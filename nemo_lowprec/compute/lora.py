"""LoRA beside a converted layer: the adapter's second GEMM adds to the layer's output.

PEFT computes ``result + lora_B(lora_A(x)) * scaling``: it writes the adapter's output, scales it, and adds it, in three
passes over tensors of the output's size, which take as long as an FP8 GEMM. Here the GEMM of ``lora_B`` scales, and
adds to the layer's output in place.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from nemo_lowprec.compat.modules import all_hooks
from nemo_lowprec.compat.tensors import base_of, is_plain
from nemo_lowprec.compat.transformers import cast_to_adapter
from nemo_lowprec.compute.adapters import peft_class
from nemo_lowprec.compute.autocast import AutocastOff
from nemo_lowprec.compute.backends.base import half_matmul, is_transformed
from nemo_lowprec.compute.class_swap import derive, is_swapped, own_forward, swap
from nemo_lowprec.tensors.dtensor import is_sharded
from nemo_lowprec.tensors.gradient import computed_dtype

NAME = "LoRA, which the adapter's GEMM adds to the layer's output"
_HALF = (torch.float16, torch.bfloat16)


class AddedLora(nn.Module):
    """A linear layer of PEFT under one adapter of plain LoRA; conversion derives its class from the module's own.

    With several adapters, merged or disabled ones, a bias, a variant (DoRA), or arguments beside the input, and where
    torch transforms or compiles the call, the module computes as PEFT does.
    """

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        name = None if args or kwargs or torch.compiler.is_compiling() or is_transformed() else _only_adapter(self)
        if name is None:
            return super().forward(x, *args, **kwargs)  # type: ignore[misc, no-any-return]
        me: Any = self
        result: Tensor = me.base_layer(x)
        first, second, scaling = me.lora_A[name], me.lora_B[name], me.scaling[name]
        hidden = first(me.lora_dropout[name](cast_to_adapter(self, x, first.weight.dtype)))
        dtype = result.dtype
        fits = is_plain(result) and is_plain(hidden) and dtype in _HALF and hidden.dtype == dtype and result.numel()
        if (
            not fits
            or base_of(result) is not None
            or (result.is_leaf and result.requires_grad)
            or not result.is_contiguous()
        ):
            return (result + second(hidden) * scaling).to(dtype)
        with AutocastOff(result.device.type):
            return _Add.apply(result, hidden, second.weight, scaling)  # type: ignore[no-any-return]


def add_adapters(model: nn.Module) -> list[str]:
    """Convert PEFT's linear layers around converted ones, in place. Returns their names."""
    linear = peft_class("peft.tuners.lora.layer", "Linear")
    found = []
    for name, module in model.named_modules():
        if type(module) is linear and is_swapped(module.base_layer) and own_forward(module) is None:  # type: ignore[arg-type]
            swap(module, derive(AddedLora, type(module)))
            found.append(name)
    return found


def _only_adapter(layer: Any) -> str | None:
    """The name of the layer's one adapter, of plain LoRA; None where PEFT has to compute."""
    active = layer.active_adapters
    if len(active) != 1 or layer.disable_adapters or layer.merged or active[0] in layer.lora_variant:
        return None
    name: str = active[0]
    if name not in layer.lora_B:
        return None
    second = layer.lora_B[name]
    hooked = any(all_hooks(second)) or any(all_hooks(layer.base_layer))  # a hook may keep an output
    plain = second.bias is None and isinstance(layer.scaling[name], int | float) and not is_sharded(second.weight)
    return name if plain and not hooked else None


class _Add(torch.autograd.Function):
    """(output [..., outs] half, hidden [..., rank] half, weight [outs, rank], scaling) to the output, in place."""

    @staticmethod
    def forward(ctx: Any, result: Tensor, hidden: Tensor, weight: Tensor, scaling: float) -> Tensor:
        half = weight.to(result.dtype)
        result.view(-1, result.shape[-1]).addmm_(hidden.reshape(-1, hidden.shape[-1]), half.t(), alpha=scaling)
        ctx.mark_dirty(result)
        ctx.save_for_backward(hidden, weight)
        ctx.scaling = scaling
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        hidden, weight = ctx.saved_tensors
        rows = grad.reshape(-1, grad.shape[-1])
        need_result, need_hidden, need_weight = ctx.needs_input_grad[:3]
        d_hidden = d_weight = None
        with AutocastOff(grad.device.type):  # a loop may call backward() under autocast
            if need_hidden:
                d_hidden = (rows @ weight.to(grad.dtype) * ctx.scaling).view(hidden.shape)
            if need_weight:
                scaled = hidden.reshape(-1, hidden.shape[-1]) * ctx.scaling
                d_weight = half_matmul(rows.t(), scaled, computed_dtype(weight))
        return grad if need_result else None, d_hidden, d_weight, None

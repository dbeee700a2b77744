"""Convolutions whose kernels do not overlap (patch embeddings) as the GEMMs of a linear layer.

Such a convolution cuts its input [batch, channels, height, width] into patches of the kernel's size and multiplies each
with the weight [out_channels, channels * height * width of the kernel]. Images of one or three dimensions alike.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nemo_lowprec.compute.compiled import has_own_weight, read_parameter
from nemo_lowprec.compute.gemm_plan import GemmPlan
from nemo_lowprec.compute.linear import compiled_linear, linear

_CONVOLVE: dict[int, Any] = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


def is_patch_embedding(module: nn.Module) -> bool:
    """Whether ``module`` is a convolution of torch that cuts its input into patches of more than one element."""
    if type(module) not in _CONVOLUTIONS or not isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d):
        return False
    padding = module.padding
    unpadded = padding == "valid" if isinstance(padding, str) else not any(padding)
    whole = module.kernel_size == module.stride and math.prod(module.kernel_size) > 1
    return unpadded and whole and set(module.dilation) == {1} and module.groups == 1


class LowPrecisionPatches(nn.Module):
    """A patch embedding by the GEMMs of a ``GemmPlan``. Conversion derives its class from the convolution's.

    Input [batch, channels, *size] or [channels, *size] of any float dtype. What is left of the size behind the last
    whole patch is cut off, as by the convolution. Output [batch, out_channels, *patches], whose channels lie next to
    each other in memory (``torch.channels_last``). With a plan without a recipe the convolution itself computes.
    """

    gemm_plan: GemmPlan

    def forward(self, input: Tensor) -> Tensor:
        own: Any = self
        plan, kernel = self.gemm_plan, own.kernel_size
        alone = input.dim() == len(kernel) + 1
        x = input.unsqueeze(0) if alone else input
        counts = tuple(size // side for size, side in zip(x.shape[2:], kernel, strict=False))
        if plan.recipe is None or x.dim() != len(kernel) + 2 or x.shape[1] != own.in_channels or 0 in counts:
            own_parameters = _read(self) if torch.compiler.is_compiling() else None
            if own_parameters is not None:
                return _CONVOLVE[len(kernel)](input, *own_parameters, stride=kernel)
            return super().forward(input)  # type: ignore[misc,no-any-return]  # Conv2d names the error in the input
        rows = copy_patches(x, kernel, counts)
        if torch.compiler.is_compiling():
            out = _compiled(self, rows)
        else:
            out = linear(rows, own.weight, own.bias, plan, self.training, False, None)
        return out.movedim(-1, 1).squeeze(0) if alone else out.movedim(-1, 1)

    def train(self, mode: bool = True) -> Any:
        if not mode and self.gemm_plan.weight is not None:
            self.gemm_plan.weight.look_again()
        return super().train(mode)

    def extra_repr(self) -> str:
        kind = self.gemm_plan.recipe.scaling if self.gemm_plan.recipe is not None else "half"
        return f"{super().extra_repr()}, {kind}, backend={self.gemm_plan.backend.name}"


@torch.compiler.disable
def _uncompiled(layer: Any, rows: Tensor) -> Tensor:
    return linear(rows, layer.weight, layer.bias, layer.gemm_plan, layer.training, False, None)


def _compiled(layer: Any, rows: Tensor) -> Tensor:
    if not _is_in_graph(layer):
        return _uncompiled(layer, rows)  # type: ignore[no-any-return]
    bias = read_parameter(layer, "bias", layer.gemm_plan.entry.bias)
    return compiled_linear(rows, layer, "weight", bias, layer.gemm_plan, False, None)


def _read(layer: Any) -> tuple[Tensor | None, Tensor | None] | None:
    """Weight and bias in the code that ``torch.compile`` traces; None where the graph cannot hold them."""
    if not _is_in_graph(layer):
        return None
    entry = layer.gemm_plan.entry
    return read_parameter(layer, "weight", entry.weight), read_parameter(layer, "bias", entry.bias)


def _is_in_graph(layer: Any) -> bool:
    entry = layer.gemm_plan.entry
    return entry is not None and entry.prepare() and has_own_weight(layer, "weight", entry)


def copy_patches(x: Tensor, kernel: tuple[int, ...], counts: tuple[int, ...]) -> Tensor:
    """[batch, channels, *size] to [batch, *counts, channels * elements of a kernel], contiguous."""
    dims = range(len(kernel))
    for i in dims:
        x = x.narrow(2 + i, 0, counts[i] * kernel[i])
    sizes = [size for pair in zip(counts, kernel, strict=True) for size in pair]
    parts = x.reshape(*x.shape[:2], *sizes)
    order = [0, *(2 + 2 * i for i in dims), 1, *(3 + 2 * i for i in dims)]
    return parts.permute(order).reshape(x.shape[0], *counts, -1)

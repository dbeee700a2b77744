"""Layers of torch's own whose half weights take FP32 input, too.

On a GPU autocast sees to most of it. A CPU has no autocast rule for norms, nor for ``Bilinear``; and no device has one
for the weights that an ``EmbeddingBag`` gives its samples.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["fp32_input_class"]


def _fit(parameter: Tensor | None, x: Tensor) -> Tensor | None:
    """A half parameter in FP32 where the input is FP32; else as it is."""
    return parameter.float() if parameter is not None and x.dtype == torch.float32 else parameter


class HalfLayerNorm(nn.LayerNorm):
    def forward(self, input: Tensor) -> Tensor:
        return F.layer_norm(input, self.normalized_shape, _fit(self.weight, input), _fit(self.bias, input), self.eps)


class HalfGroupNorm(nn.GroupNorm):
    def forward(self, input: Tensor) -> Tensor:
        return F.group_norm(input, self.num_groups, _fit(self.weight, input), _fit(self.bias, input), self.eps)


class HalfBilinear(nn.Bilinear):
    def forward(self, input1: Tensor, input2: Tensor) -> Tensor:
        dtype = torch.promote_types(torch.promote_types(input1.dtype, input2.dtype), self.weight.dtype)
        bias = None if self.bias is None else self.bias.to(dtype)
        return F.bilinear(input1.to(dtype), input2.to(dtype), self.weight.to(dtype), bias)


class HalfEmbeddingBag(nn.EmbeddingBag):
    def forward(self, input: Tensor, offsets: Tensor | None = None, per_sample_weights: Tensor | None = None) -> Tensor:
        if per_sample_weights is not None:
            per_sample_weights = per_sample_weights.to(self.weight.dtype)
        return super().forward(input, offsets, per_sample_weights)


_ON_CPU: dict[type[nn.Module], type[nn.Module]] = {
    nn.LayerNorm: HalfLayerNorm,
    nn.GroupNorm: HalfGroupNorm,
    nn.Bilinear: HalfBilinear,
}


def fp32_input_class(module: nn.Module, on_cpu: bool) -> type[nn.Module] | None:
    """The class that ``module`` needs to take FP32 input; None where torch's own takes it."""
    if "forward" in module.__dict__:
        return None
    if type(module) is nn.EmbeddingBag:
        return HalfEmbeddingBag
    return _ON_CPU.get(type(module)) if on_cpu else None

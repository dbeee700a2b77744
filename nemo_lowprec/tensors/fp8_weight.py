"""A weight stored in FP8 with one scale: under ``fp8_params`` and at MS-AMP O3."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from nemo_lowprec.formats.floats import FloatFormat, cast, decode
from nemo_lowprec.formats.scale import compute_amax, compute_scale, power_of_two_scale
from nemo_lowprec.kernels.loader import fused_kernels
from nemo_lowprec.tensors.quantized_tensor import QuantizedTensor


class Fp8Weight(QuantizedTensor):
    """Per-tensor scaled FP8 storage of shape ``data_fp8.shape`` that reads as ``dtype``."""

    PARTS = ("data_fp8", "scale_inv")
    SETTINGS = ("fmt", "margin", "power_of_two")
    data_fp8: Tensor  # float8, of the same shape
    scale_inv: Tensor  # FP32 [1]; value = data_fp8 * scale_inv
    fmt: FloatFormat  # the storage format
    margin: int  # scales are divided by 2**margin
    power_of_two: bool  # whether scales are powers of two

    @staticmethod
    def __new__(
        cls, data_fp8: Tensor, scale_inv: Tensor, fmt: FloatFormat, dtype: torch.dtype, margin: int = 0,
        power_of_two: bool = False,
    ):  # fmt: skip
        settings = {"fmt": fmt, "margin": margin, "power_of_two": power_of_two}
        return cls._wrap((data_fp8, scale_inv), settings, dtype)

    @classmethod
    def from_float(
        cls, values: Tensor, fmt: FloatFormat, dtype: torch.dtype, margin: int = 0, power_of_two: bool = False
    ) -> Fp8Weight:
        """Quantize ``values`` with the scale of their own amax."""
        values = values.detach()
        scale = _scale(values, fmt, margin, power_of_two)
        data = cast(values.float() * scale, fmt).view(values.shape)
        return cls(data, scale.reciprocal(), fmt, dtype, margin, power_of_two)

    @torch.no_grad()
    def quantize_(self, values: Tensor) -> Fp8Weight:
        """Store ``values`` anew, with the scale of their own amax."""
        plain = values.dim() == 2 and self.data_fp8.is_contiguous() and not self.power_of_two
        kernels = fused_kernels() if values.is_cuda and plain else None
        if kernels is not None:
            _, _, scale_inv = kernels.quantize_current(values, self.fmt, self.margin, True, False, out=self.data_fp8)
            self.scale_inv.copy_(scale_inv)
            if not self.data_fp8.is_inference():  # the kernel's write is not counted
                torch.autograd.graph.increment_version(self.data_fp8)
            return self
        scale = _scale(values, self.fmt, self.margin, self.power_of_two)
        self.data_fp8.copy_(cast(values.float() * scale, self.fmt))
        self.scale_inv.copy_(scale.reciprocal())
        return self

    def transposed(self) -> Fp8Weight:
        """The transpose of a 2-D tensor, sharing the storage (``t()`` is a plain tensor of the values)."""
        return self._with(self.data_fp8.t(), self.scale_inv)

    def matrix(self) -> Fp8Weight:
        """[first dimension, all others], sharing the storage."""
        return self._with(self.data_fp8.flatten(1), self.scale_inv)

    def rows(self, start: int, stop: int) -> Fp8Weight:
        """Some of the rows, sharing the storage and the scale (a slice is a plain tensor of the values)."""
        return self._with(self.data_fp8[start:stop], self.scale_inv)

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """The values as a plain tensor."""
        return (decode(self.data_fp8) * self.scale_inv).view(self.shape).to(dtype or self.dtype)

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"Fp8Weight({self.fmt.name}, shape={tuple(self.shape)}, reads as {self.dtype})"


def _scale(values: Tensor, fmt: FloatFormat, margin: int, power_of_two: bool) -> Tensor:
    amax = compute_amax(values).reshape(1)
    return power_of_two_scale(amax, fmt, margin) if power_of_two else compute_scale(amax, fmt.max, margin)

"""A tensor in blocks of 128 elements with power-of-two scales that reads as FP32: optimizer states, FP16 masters."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from nemo_lowprec.formats.block_scale_128 import UNIT, block_grid, dequantize_rows, quantize_rows
from nemo_lowprec.formats.floats import E4M3, FP16, FloatFormat
from nemo_lowprec.kernels.loader import block_kernels
from nemo_lowprec.tensors.quantized_tensor import QuantizedTensor


class BlockScaledTensor(QuantizedTensor):
    """Storage in E4M3, E5M3, E2M5 or FP16, one exponent a block, that reads as FP32."""

    PARTS: ClassVar[tuple[str, ...]] = ("data_blocks", "exponent")
    SETTINGS: ClassVar[tuple[str, ...]] = ("fmt",)
    data_blocks: Tensor  # the elements, contiguous, of the tensor's shape
    exponent: Tensor  # uint8 [rows, blocks of a row]; value = data_blocks * 2**(exponent - 127). See block_scale_128
    fmt: FloatFormat  # the storage format

    @staticmethod
    def __new__(cls, data_blocks: Tensor, exponent: Tensor, fmt: FloatFormat):
        return cls._wrap((data_blocks, exponent), {"fmt": fmt}, torch.float32)

    @classmethod
    def zeros(cls, shape: torch.Size | tuple[int, ...], fmt: FloatFormat, device: torch.device) -> Any:
        """A tensor of zeros."""
        rows, _, blocks = block_grid(tuple(shape))
        exponent = torch.full((rows, blocks), UNIT, dtype=torch.uint8, device=device)
        return cls(torch.zeros(shape, dtype=fmt.dtype, device=device), exponent, fmt)

    @classmethod
    def from_float(cls, values: Tensor, fmt: FloatFormat) -> Any:
        """Quantize ``values``."""
        return cls(*quantize_blocks_of_rows(values.detach(), fmt), fmt)

    @torch.no_grad()
    def quantize_(self, values: Tensor) -> Any:
        """Store ``values`` anew."""
        return self.set_blocks_(*quantize_blocks_of_rows(values, self.fmt))

    @torch.no_grad()
    def set_blocks_(self, data: Tensor, exponent: Tensor) -> Any:
        """Copy quantized values into this tensor's own storage."""
        self.data_blocks.copy_(data)
        self.exponent.copy_(exponent)
        return self

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """The values as a plain tensor."""
        return dequantize_rows(self.data_blocks, self.exponent).to(dtype or self.dtype)


def quantize_blocks_of_rows(values: Tensor, fmt: FloatFormat, positive: bool = False) -> tuple[Tensor, Tensor]:
    """``quantize_rows`` to nearest, by the fused kernel where there is one."""
    kernels = block_kernels() if values.is_cuda and fmt in (E4M3, FP16) else None
    if kernels is None:
        return quantize_rows(values, fmt, positive=positive)
    data, exponent, _ = kernels.quantize(values, fmt, positive)
    return data, exponent

"""The sums of errors of many tensors on one device, a row each, which kernels add to."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from nemo_lowprec.compute.backends.base import Orientation
from nemo_lowprec.formats import E4M3, E5M2, FP16, BlockScaledMatrix, decode, dequantize_blocks
from nemo_lowprec.formats.block_scale_128 import block_grid, dequantize_rows
from nemo_lowprec.formats.errors import add_errors, clear, clipped_beyond, new_sums
from nemo_lowprec.kernels.loader import error_kernels
from nemo_lowprec.tensors import GradientTensor

# Scaled magnitudes that are clipped, by the dtype of the stored data. FP32 data are NVFP4's: the largest value is 6,
# half a step of 2 below the next one.
_LIMITS = {fmt.dtype: clipped_beyond(fmt) for fmt in (E4M3, E5M2, FP16)} | {
    torch.bfloat16: math.inf,
    torch.float32: 7.0,
}


class ErrorTable:
    """Sums and extremes (``formats.errors``) of rows. All methods but ``read`` only launch kernels.

    Args:
        rows: number of rows.
        device: of the tensors.
    """

    def __init__(self, rows: int, device: torch.device) -> None:
        # Kernels that are captured in a CUDA graph write this memory: it stays where it is.
        self.sums, self.extremes = new_sums(rows, device)

    def clear(self) -> None:
        """Empty all rows."""
        clear(self.sums, self.extremes)

    def add(self, row: int, values: Tensor, part: Orientation) -> None:
        """Add the errors of ``values`` [rows, cols], which are stored in ``part`` in this orientation."""
        limit, layout = _LIMITS[part.data.dtype], part.layout
        kernels = error_kernels() if values.is_cuda else None
        scales = None if kernels is None else _scales(part)
        if kernels is None or scales is None:
            stored, scale_inv = _dequantized(part)
            add_errors(self.sums[row], self.extremes[row], values, stored, scale_inv, limit)
            return
        rows = 0 if layout is None else layout.rows
        kernels.add_errors(self.sums[row], self.extremes[row], values, part.data, scales, rows, limit)

    def add_gradient(self, row: int, values: Tensor, stored: GradientTensor) -> None:
        """Add the errors of a gradient that was just stored in FP8, with a factor of 1."""
        kernels = error_kernels() if values.is_cuda else None
        if kernels is None:
            data = dequantize_rows(stored.data_blocks, stored.exponent).view(values.shape)
            scale_inv = torch.zeros((), device=values.device, dtype=torch.float32)  # blocks have many
            add_errors(self.sums[row], self.extremes[row], values, data, scale_inv, math.inf)
            return
        rows, cols, _ = block_grid(stored.shape)
        matrix = values.reshape(rows, cols), stored.data_blocks.view(rows, cols)
        kernels.add_errors(self.sums[row], self.extremes[row], *matrix, stored.exponent, 1, math.inf)


def _dequantized(part: Orientation) -> tuple[Tensor, Tensor]:
    """The values of a stored matrix, FP32, and its scale_inv for each of them."""
    if part.layout is None:
        return decode(part.data) * part.scale_inv, part.scale_inv
    stored = dequantize_blocks(BlockScaledMatrix(part.data, part.scale_inv, part.layout))
    ones = torch.ones((), device=part.data.device, dtype=torch.float32).expand(part.data.shape)
    return stored, dequantize_blocks(BlockScaledMatrix(ones, part.scale_inv, part.layout))


def _scales(part: Orientation) -> Tensor | None:
    """scale_inv as the kernel reads it, [rows of blocks, blocks of a row]; None where the kernel does not."""
    layout, scale_inv = part.layout, part.scale_inv
    if layout is None:
        return scale_inv.view(1, 1).expand(1, -(-part.data.shape[1] // 128))
    if not error_kernels().fits(layout.rows, layout.cols):  # type: ignore[union-attr]
        return None
    if layout.for_cublas:
        return scale_inv.t() if layout.rows == 1 else scale_inv
    return scale_inv if layout.cols else scale_inv.view(-1, 1).expand(-1, -(-part.data.shape[1] // 128))

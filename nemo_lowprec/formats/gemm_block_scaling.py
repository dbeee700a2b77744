"""Block-scaled operands of GEMMs: FP8 with a scale for a row or for 1x128 and 128x128 blocks, MXFP8 and NVFP4.

A 2-D tensor is cut into blocks along its last dimension (the one that a GEMM contracts) and, for 2-D blocks, its
first; each block has its own scale. Sources: DeepSeek-V3, arXiv:2412.19437, section 3.3 (1x128, 128x128); OCP
Microscaling formats, arXiv:2310.10537 (MXFP8); "Pretraining LLMs with NVFP4", arXiv:2509.25149. The scale of a row is
that of torchao's recipe ``rowwise``: a power of two, so that both orientations of an operand round a value alike.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from nemo_lowprec.formats.floats import E4M3, FloatFormat, cast, decode

_E2M1_GRID = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_FP32_MAX = torch.finfo(torch.float32).max


@dataclass(frozen=True)
class BlockLayout:
    """Size of a block, and how its scale is stored.

    Attributes:
        rows, cols: block size; ``cols`` runs along the contracted dimension, and is 0 for the whole row.
        scale: ``fp32_pow2`` (a power of two, at most max/amax), ``e8m0`` (MX: a power of two, at least amax/max) or
            ``e4m3`` (NVFP4: an E4M3 scale a block and an FP32 scale a tensor; elements are E2M1).
        for_cublas: whether the scales lie as cuBLASLt reads them (see ``scales_shape``).
    """

    rows: int
    cols: int
    scale: str
    for_cublas: bool = False

    def grid(self, rows: int, cols: int) -> tuple[int, int]:
        """(rows of blocks, blocks of a row) of a matrix [rows, cols]."""
        return -(-rows // self.rows), -(-cols // self.cols) if self.cols else 1


WHOLE_ROW = BlockLayout(1, 0, "fp32_pow2")
ROW_128 = BlockLayout(1, 128, "fp32_pow2")
SQUARE_128 = BlockLayout(128, 128, "fp32_pow2")
CUBLAS_ROW_128, CUBLAS_SQUARE_128 = replace(ROW_128, for_cublas=True), replace(SQUARE_128, for_cublas=True)
MX_32 = BlockLayout(1, 32, "e8m0")
NVFP4_ROW_16 = BlockLayout(1, 16, "e4m3")
NVFP4_SQUARE_16 = BlockLayout(16, 16, "e4m3")


@dataclass
class BlockScaledMatrix:
    """A block-scaled 2-D tensor.

    Attributes:
        data: [rows, cols]; float8, or for NVFP4 the E2M1 values as FP32.
        scale_inv: FP32, [rows of blocks, blocks of a row], or ``scales_shape`` where the layout is for
            cuBLASLt; value = data * scale_inv.
        layout: the blocks.
    """

    data: Tensor
    scale_inv: Tensor
    layout: BlockLayout


def _block_amax(values: Tensor, layout: BlockLayout) -> Tensor:
    rows, cols = values.shape
    high, wide = layout.grid(rows, cols)
    block_cols = layout.cols or cols
    padded = F.pad(values.abs(), (0, wide * block_cols - cols, 0, high * layout.rows - rows))
    blocks = padded.view(high, layout.rows, wide, block_cols)
    return blocks.amax(dim=(1, 3))


def _expand(scales: Tensor, layout: BlockLayout, shape: torch.Size) -> Tensor:
    full = scales.repeat_interleave(layout.rows, 0).repeat_interleave(layout.cols or shape[1], 1)
    return full[: shape[0], : shape[1]]


def _pow2_scale_inv(amax: Tensor, fmt: FloatFormat, layout: BlockLayout) -> Tensor:
    # frexp is exact where log2 is not: x = m * 2**e with 0.5 <= m < 1.
    usable = (amax > 0) & torch.isfinite(amax)
    safe = torch.where(usable, amax, torch.ones_like(amax))
    if layout.scale == "e8m0":
        mantissa, exponent = torch.frexp(safe / fmt.max)
        exponent = torch.where(mantissa == 0.5, exponent - 1, exponent)  # ceil(log2)
        scale_inv = torch.ldexp(torch.ones_like(amax), exponent.clamp(-127, 127))
        # TE's codes for other amaxes: 0 gives the smallest scale, infinity the largest, NaN stays NaN.
        rest = torch.where(torch.isinf(amax), torch.full_like(amax, 2.0**127), amax.clamp(min=2.0**-127))
        return torch.where(usable, scale_inv, rest)
    _, exponent = torch.frexp((amax.new_full((), fmt.max) / safe).clamp(max=_FP32_MAX))  # floor(log2) = exponent - 1
    scale_inv = torch.ldexp(torch.ones_like(amax), -(exponent - 1).clamp(-126, 126))
    return torch.where(usable, scale_inv, torch.ones_like(amax))


@lru_cache(maxsize=16)
def _grid(device: torch.device) -> Tensor:
    return torch.tensor(_E2M1_GRID, device=device, dtype=torch.float32)


def _round_e2m1(values: Tensor, generator: torch.Generator | None) -> Tensor:
    grid = _grid(values.device)
    magnitude = values.abs().clamp(max=_E2M1_GRID[-1])
    upper = torch.bucketize(magnitude, grid).clamp(max=len(_E2M1_GRID) - 1)
    lower = (upper - 1).clamp(min=0)
    low, high = grid[lower], grid[upper]
    gap = torch.where(high > low, high - low, torch.ones_like(high))
    fraction = (magnitude - low) / gap
    if generator is not None:
        up = torch.rand(values.shape, generator=generator, device=values.device, dtype=torch.float32) < fraction
    else:
        # To nearest, ties to the even mantissa: even positions of the grid have mantissa 0.
        up = (fraction > 0.5) | ((fraction == 0.5) & (upper % 2 == 0))
    return torch.copysign(torch.where(up, high, low), values)


def _quantize_nvfp4(values: Tensor, layout: BlockLayout, generator: torch.Generator | None) -> BlockScaledMatrix:
    amax = values.abs().amax() if values.numel() else values.new_zeros(())
    usable = (amax > 0) & torch.isfinite(amax)
    tensor_scale = torch.where(
        usable, amax.new_full((), E4M3.max * _E2M1_GRID[-1]) / amax, torch.ones_like(amax)
    ).clamp(max=_FP32_MAX)
    block_scale = decode(cast(_block_amax(values, layout) / _E2M1_GRID[-1] * tensor_scale, E4M3))
    scale_inv = block_scale / tensor_scale
    step = _expand(scale_inv, layout, values.shape)
    scaled = torch.where(step > 0, values / step, torch.zeros_like(values))
    return BlockScaledMatrix(_round_e2m1(scaled, generator), scale_inv, layout)


def scales_shape(square: bool, rows: int, cols: int) -> tuple[int, int]:
    """The shape in which cuBLASLt reads the scales of a matrix [rows, cols] in 1x128 or ``square`` 128x128 blocks.

    That is [blocks of a row, rows], or [rows of blocks, blocks of a row up to a multiple of 4].
    """
    across = -(-cols // 128)
    return (-(-rows // 128), -(-across // 4) * 4) if square else (across, rows)


def quantize_blocks(
    values: Tensor, fmt: FloatFormat, layout: BlockLayout, generator: torch.Generator | None = None
) -> BlockScaledMatrix:
    """Quantize a 2-D tensor in blocks.

    Args:
        values: [rows, cols], any float dtype.
        fmt: element format; ignored by NVFP4, whose elements are E2M1.
        layout: the blocks.
        generator: NVFP4 only: round stochastically with this generator.
    """
    values = values.float()
    if layout.scale == "e4m3":
        return _quantize_nvfp4(values, layout, generator)
    scale_inv = _pow2_scale_inv(_block_amax(values, layout), fmt, layout)
    return BlockScaledMatrix(cast(values / _expand(scale_inv, layout, values.shape), fmt), scale_inv, layout)


def dequantize_blocks(tensor: BlockScaledMatrix) -> Tensor:
    """Return the values of a block-scaled tensor as FP32 [rows, cols]."""
    data = decode(tensor.data) if tensor.data.element_size() == 1 else tensor.data
    scale_inv, layout = tensor.scale_inv, tensor.layout
    if layout.for_cublas:
        scale_inv = scale_inv.t() if layout.rows == 1 else scale_inv[:, : -(-data.shape[1] // layout.cols)]
    return data * _expand(scale_inv, layout, data.shape)

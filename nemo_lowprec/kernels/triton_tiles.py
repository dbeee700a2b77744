"""Quantization to FP8 with a scale for 1x128 or 128x128 elements, in both orientations and one pass, on a GPU.

Data and scales are bit for bit those of ``formats.gemm_block_scaling``. Scales are laid out as cuBLASLt reads them:
[blocks of a row, rows] for 1x128, [rows of blocks, blocks of a row up to a multiple of 4] for 128x128 elements.
Importing this file needs Triton.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from nemo_lowprec.formats.floats import FloatFormat
from nemo_lowprec.formats.gemm_block_scaling import scales_shape
from nemo_lowprec.kernels.launcher import Launcher
from nemo_lowprec.kernels.memory import new

BLOCK = 128
_WARPS = 4


@triton.jit
def exponent_of(bits, FP8_MAX: tl.constexpr):
    """The exponent of the scale of a block whose amax has these bits: floor(log2(FP8_MAX / amax))."""
    amax = bits.to(tl.float32, bitcast=True)
    usable = (bits > 0) & (bits < 0x7F800000)
    ratio = tl.div_rn(tl.full(bits.shape, FP8_MAX, tl.float32), tl.where(usable, amax, 1.0))
    ratio = tl.where(ratio > 3.4028234663852886e38, 3.4028234663852886e38, ratio)
    exponent = ((ratio.to(tl.int32, bitcast=True) >> 23) & 255) - 127
    exponent = tl.where(exponent > 126, 126, exponent)
    return tl.where(usable, exponent, 0)


@triton.jit
def power_of(exponent):
    """2**exponent of a normal FP32 number."""
    return ((exponent + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit(do_not_specialize=["row_scales", "col_scales"])
def _tiles_kernel(
    x_ptr, row_ptr, col_ptr, row_scale_ptr, col_scale_ptr, rows, cols, stride_m, stride_n, row_scales, col_scales,
    FP8_MAX: tl.constexpr, SQUARE: tl.constexpr, ROWWISE: tl.constexpr, COLUMNWISE: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Quantize a tile of [SIZE, SIZE]. ``row_scales``, ``col_scales``: elements of a line of the scales."""
    tiles_n = tl.cdiv(cols, SIZE)
    pid = tl.program_id(0)
    tile_m, tile_n = pid // tiles_n, pid % tiles_n
    m = tile_m.to(tl.int64) * SIZE + tl.arange(0, SIZE)
    n = tile_n.to(tl.int64) * SIZE + tl.arange(0, SIZE)
    inside = (m < rows)[:, None] & (n < cols)[None, :]
    x = tl.load(x_ptr + m[:, None] * stride_m + n[None, :] * stride_n, mask=inside, other=0.0).to(tl.float32)
    bits = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF  # as integers magnitudes order alike, and NaN is the largest
    if SQUARE:
        exponent = exponent_of(tl.max(tl.max(bits, axis=1), axis=0), FP8_MAX)
        q = (x * power_of(exponent)).to(row_ptr.dtype.element_ty)  # the GPU's conversion saturates, and keeps NaN
        if ROWWISE:
            tl.store(row_ptr + m[:, None] * cols + n[None, :], q, mask=inside)
            tl.store(row_scale_ptr + tile_m * row_scales + tile_n, power_of(-exponent))
        if COLUMNWISE:
            tl.store(col_scale_ptr + tile_n * col_scales + tile_m, power_of(-exponent))
    else:
        if ROWWISE:
            exponent = exponent_of(tl.max(bits, axis=1), FP8_MAX)
            q = (x * power_of(exponent)[:, None]).to(row_ptr.dtype.element_ty)
            tl.store(row_ptr + m[:, None] * cols + n[None, :], q, mask=inside)
            tl.store(row_scale_ptr + tile_n * row_scales + m, power_of(-exponent), mask=m < rows)
        if COLUMNWISE:
            exponent = exponent_of(tl.max(bits, axis=0), FP8_MAX)
            q = (x * power_of(exponent)[None, :]).to(row_ptr.dtype.element_ty)
            tl.store(col_scale_ptr + tile_m * col_scales + n, power_of(-exponent), mask=n < cols)
    if COLUMNWISE:
        # The store of a transposed tile takes longer: Triton moves the values between layouts in either case.
        tl.store(col_ptr + n[None, :] * rows + m[:, None], q, mask=inside)


_tiles = Launcher(_tiles_kernel, num_warps=_WARPS)


def quantize(
    values: Tensor, fmt: FloatFormat, square: bool, rowwise: bool, columnwise: bool
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """Quantize ``values`` [rows, cols], FP32 or half, any strides, on a GPU; both sides are multiples of 16.

    Returns:
        rowwise data [rows, cols] and their 1 / scale, columnwise data [cols, rows] and their 1 / scale, FP32 of
        ``scales_shape``; None for what is not wanted.
    """
    rows, cols = values.shape
    device = values.get_device()
    if square and columnwise and values.dtype == torch.float32:
        # Triton 3.6 moves an 8-bit tile that was loaded as FP32 wrongly between layouts. Where each orientation has
        # scales of its own, Triton moves the FP32 tile.
        row, row_scale, _, _ = quantize(values, fmt, square, True, False)
        assert row is not None and row_scale is not None
        flipped = new(device, scales_shape(square, cols, rows), torch.float32)
        flipped[:, : row_scale.shape[0]] = row_scale[:, : flipped.shape[0]].t()
        turned = row.t().contiguous()
        return (row, row_scale, turned, flipped) if rowwise else (None, None, turned, flipped)
    row = row_scale = col = col_scale = None
    if rowwise:
        row = new(device, (rows, cols), fmt.dtype)
        row_scale = new(device, scales_shape(square, rows, cols), torch.float32)
    if columnwise:
        col = new(device, (cols, rows), fmt.dtype)
        col_scale = new(device, scales_shape(square, cols, rows), torch.float32)
    some, some_scale = (col, col_scale) if row is None else (row, row_scale)
    if some is None or some_scale is None or not rows * cols:
        return row, row_scale, col, col_scale
    args = (
        values, some, some if col is None else col, some_scale, some_scale if col_scale is None else col_scale, rows,
        cols, *values.stride(), 0 if row_scale is None else row_scale.shape[1],
        0 if col_scale is None else col_scale.shape[1],
    )  # fmt: skip
    plain = values.is_contiguous() and not values.data_ptr() % 16
    key = (values.dtype, fmt.dtype, square, rowwise, columnwise) if plain else None
    programs = -(-rows // BLOCK) * -(-cols // BLOCK)
    _tiles(
        device, key, programs, args,
        lambda: {
            "FP8_MAX": fmt.max, "SQUARE": square, "ROWWISE": rowwise, "COLUMNWISE": columnwise, "SIZE": BLOCK,
        },
    )  # fmt: skip
    return row, row_scale, col, col_scale

"""Quantization to FP8 with a scale for each row, and in the other orientation for each column, on a GPU.

Data and scales are bit for bit those of ``formats.gemm_block_scaling`` with ``WHOLE_ROW``. Two passes read the values:
the first one finds the amaxes of rows and columns, the second one casts. Where rows alone are wanted, one launch does
both for some whole rows, which are in the cache when they are read again. Importing this file needs Triton.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from nemo_lowprec.formats.floats import FloatFormat
from nemo_lowprec.kernels.launcher import Launcher
from nemo_lowprec.kernels.memory import new
from nemo_lowprec.kernels.triton_tiles import exponent_of, power_of

_TILE, _WARPS = 128, 4
_ROWS, _CHUNK = 4, 1024  # of a program that reads whole rows: rows, and columns at a time


@triton.jit
def raise_amaxes(amax_ptr, at, bits, inside):
    """Raise amaxes, as bits of FP32 numbers, to ``bits`` where these are larger."""
    # Most tiles raise few of the amaxes: the comparison saves the other atomics.
    larger = inside & (bits > tl.load(amax_ptr + at, mask=inside, other=0))
    tl.atomic_max(amax_ptr + at, bits, mask=larger, sem="relaxed")


@triton.jit
def _amax_kernel(
    x_ptr, row_amax_ptr, col_amax_ptr, rows, cols, stride_m, stride_n, ROWWISE: tl.constexpr,
    COLUMNWISE: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Raise the amaxes (int32, bits of FP32 numbers, at first 0) to the amaxes of a tile of [SIZE, SIZE]."""
    tiles_n = tl.cdiv(cols, SIZE)
    pid = tl.program_id(0)
    m = (pid // tiles_n).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    n = (pid % tiles_n).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    inside = (m < rows)[:, None] & (n < cols)[None, :]
    x = tl.load(x_ptr + m[:, None] * stride_m + n[None, :] * stride_n, mask=inside, other=0.0).to(tl.float32)
    bits = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF  # as integers magnitudes order alike, and NaN is the largest
    if ROWWISE:
        raise_amaxes(row_amax_ptr, m, tl.max(bits, axis=1), m < rows)
    if COLUMNWISE:
        raise_amaxes(col_amax_ptr, n, tl.max(bits, axis=0), n < cols)


@triton.jit
def _cast_kernel(
    x_ptr, row_amax_ptr, col_amax_ptr, row_ptr, col_ptr, row_scale_ptr, col_scale_ptr, rows, cols, stride_m, stride_n,
    FP8_MAX: tl.constexpr, ROWWISE: tl.constexpr, COLUMNWISE: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Quantize a tile of [SIZE, SIZE] with the scales of the amaxes. The first tiles store 1 / scale."""
    tiles_n = tl.cdiv(cols, SIZE)
    pid = tl.program_id(0)
    tile_m, tile_n = pid // tiles_n, pid % tiles_n
    m = tile_m.to(tl.int64) * SIZE + tl.arange(0, SIZE)
    n = tile_n.to(tl.int64) * SIZE + tl.arange(0, SIZE)
    inside = (m < rows)[:, None] & (n < cols)[None, :]
    x = tl.load(x_ptr + m[:, None] * stride_m + n[None, :] * stride_n, mask=inside, other=0.0).to(tl.float32)
    if ROWWISE:
        exponent = exponent_of(tl.load(row_amax_ptr + m, mask=m < rows, other=0), FP8_MAX)
        q = (x * power_of(exponent)[:, None]).to(row_ptr.dtype.element_ty)  # saturates, and keeps NaN
        tl.store(row_ptr + m[:, None] * cols + n[None, :], q, mask=inside)
        if tile_n == 0:
            tl.store(row_scale_ptr + m, power_of(-exponent), mask=m < rows)
    if COLUMNWISE:
        exponent = exponent_of(tl.load(col_amax_ptr + n, mask=n < cols, other=0), FP8_MAX)
        q = (x * power_of(exponent)[None, :]).to(row_ptr.dtype.element_ty)
        tl.store(col_ptr + n[None, :] * rows + m[:, None], q, mask=inside)
        if tile_m == 0:
            tl.store(col_scale_ptr + n, power_of(-exponent), mask=n < cols)


@triton.jit
def _whole_rows_kernel(
    x_ptr, row_ptr, row_scale_ptr, rows, cols, stride_m, FP8_MAX: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Quantize ``BM`` rows, whose elements lie next to each other."""
    m = tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM)
    largest = tl.zeros([BM], dtype=tl.int32)
    for start in range(0, cols, BN):
        n = start + tl.arange(0, BN)
        inside = (m < rows)[:, None] & (n < cols)[None, :]
        x = tl.load(x_ptr + m[:, None] * stride_m + n[None, :], mask=inside, other=0.0).to(tl.float32)
        largest = tl.maximum(largest, tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=1))
    exponent = exponent_of(largest, FP8_MAX)
    tl.store(row_scale_ptr + m, power_of(-exponent), mask=m < rows)
    for start in range(0, cols, BN):
        n = start + tl.arange(0, BN)
        inside = (m < rows)[:, None] & (n < cols)[None, :]
        x = tl.load(x_ptr + m[:, None] * stride_m + n[None, :], mask=inside, other=0.0).to(tl.float32)
        q = (x * power_of(exponent)[:, None]).to(row_ptr.dtype.element_ty)
        tl.store(row_ptr + m[:, None] * cols + n[None, :], q, mask=inside)


_whole_rows = Launcher(_whole_rows_kernel, num_warps=_WARPS)
_amax = Launcher(_amax_kernel, num_warps=_WARPS)
_cast = Launcher(_cast_kernel, num_warps=_WARPS)


def quantize(
    values: Tensor, fmt: FloatFormat, rowwise: bool, columnwise: bool
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """Quantize ``values`` [rows, cols], FP32 or half, any strides, on a GPU; without a host sync.

    Returns:
        rowwise data [rows, cols] and their 1 / scale [rows, 1], columnwise data [cols, rows] and their 1 / scale
        [cols, 1], scales in FP32; None for what is not wanted.
    """
    rows, cols = values.shape
    device = values.get_device()
    row = row_scale = col = col_scale = None
    if rowwise:
        row, row_scale = new(device, (rows, cols), fmt.dtype), new(device, (rows, 1), torch.float32)
    if columnwise:
        col, col_scale = new(device, (cols, rows), fmt.dtype), new(device, (cols, 1), torch.float32)
    some, some_scale = (col, col_scale) if row is None else (row, row_scale)
    if some is None or some_scale is None or not rows * cols:
        return row, row_scale, col, col_scale
    even = not (rows % 16 or cols % 16 or values.data_ptr() % 16) and values.is_contiguous()
    if not columnwise and values.stride(1) == 1:
        _whole_rows(
            device, (values.dtype, fmt.dtype) if even else None, -(-rows // _ROWS),
            (values, some, some_scale, rows, cols, values.stride(0)),
            lambda: {"FP8_MAX": fmt.max, "BM": _ROWS, "BN": _CHUNK},
        )  # fmt: skip
        return row, row_scale, col, col_scale
    amaxes = torch.zeros(rowwise * rows + columnwise * cols, dtype=torch.int32, device=values.device)
    of_rows, of_cols = amaxes, amaxes[rowwise * rows :] if columnwise else amaxes
    programs = -(-rows // _TILE) * -(-cols // _TILE)
    _amax(
        device, (values.dtype, rowwise, columnwise) if even else None, programs,
        (values, of_rows, of_cols, rows, cols, *values.stride()),
        lambda: {"ROWWISE": rowwise, "COLUMNWISE": columnwise, "SIZE": _TILE},
    )  # fmt: skip
    _cast(
        device, (values.dtype, fmt.dtype, rowwise, columnwise) if even else None, programs,
        (
            values, of_rows, of_cols, some, some if col is None else col, some_scale,
            some_scale if col_scale is None else col_scale, rows, cols, *values.stride(),
        ),
        lambda: {"FP8_MAX": fmt.max, "ROWWISE": rowwise, "COLUMNWISE": columnwise, "SIZE": _TILE},
    )  # fmt: skip
    return row, row_scale, col, col_scale

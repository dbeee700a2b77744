"""The grouped GEMMs of ``triton_grouped`` for operands with a scale of 1x128 or 128x128 elements, and their rows.

Rows have a scale for 128 features, [blocks of features, rows]; columns one for the 128 places of a tile, [tiles,
features]; weights one for 128x128 elements, as ``triton_tiles`` lays them out. The products of two blocks are scaled
and added in FP32. Importing this file needs Triton.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from nemo_lowprec.formats.floats import FloatFormat
from nemo_lowprec.kernels.triton_experts import _tile_rows
from nemo_lowprec.kernels.triton_grouped import TILE, Tables, Weight, described, multiprocessors, tile_of, zero_rest
from nemo_lowprec.kernels.triton_tiles import exponent_of, power_of

BLOCK = 128


class Quantized(NamedTuple):
    """FP8 rows [rows, features] and columns [features, places], each with 1 / scale; None for an unread orientation."""

    row: Tensor | None
    row_scale: Tensor | None
    col: Tensor | None
    col_scale: Tensor | None


@triton.jit
def _quantize_kernel(
    x_ptr, order_ptr, tiles_ptr, total_ptr, owners_ptr, row_ptr, row_scale_ptr, col_ptr, col_scale_ptr, rows, width,
    places, top_k,
    GATHER: tl.constexpr, FP8_MAX: tl.constexpr, ROWWISE: tl.constexpr, COLUMNWISE: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    across = tl.cdiv(width, SIZE)
    pid = tl.program_id(0)
    there, row, left, place = _tile_rows(tiles_ptr, total_ptr, owners_ptr, pid // across, SIZE, SIZE)
    if not there:
        return
    m, n = tl.arange(0, SIZE), tl.arange(0, SIZE)
    block = pid % across
    col = block * SIZE
    inside = (m < left)[:, None] & (col + n < width)[None, :]
    source = row + m
    if GATHER:
        source = tl.load(order_ptr + row + m, mask=m < left, other=0) // top_k
    x = tl.load(x_ptr + source[:, None].to(tl.int64) * width + (col + n)[None, :], mask=inside, other=0.0)
    x = x.to(tl.float32)
    bits = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    line = (row + m).to(tl.int64)
    if ROWWISE:
        exponent = exponent_of(tl.max(bits, axis=1), FP8_MAX)
        q = (x * power_of(exponent)[:, None]).to(row_ptr.dtype.element_ty)  # which saturates, and keeps NaN
        tl.store(row_ptr + line[:, None] * width + (col + n)[None, :], q, mask=inside)
        tl.store(row_scale_ptr + block.to(tl.int64) * rows + line, power_of(-exponent), mask=m < left)
    if COLUMNWISE:
        exponent = exponent_of(tl.max(bits, axis=0), FP8_MAX)
        q = (x * power_of(exponent)[None, :]).to(row_ptr.dtype.element_ty)
        tl.store(col_scale_ptr + (place // SIZE) * width + col + n, power_of(-exponent), mask=col + n < width)
        where = col_ptr + (col + n)[None, :].to(tl.int64) * places + (place + m)[:, None]
        tl.store(where, q, mask=(col + n < width)[None, :] & (m < places)[:, None])


def quantize(
    values: Tensor, order: Tensor | None, top_k: int, fmt: FloatFormat, tables: Tables, rowwise: bool, columnwise: bool
) -> Quantized:
    """Half rows quantized.

    Args:
        values: half, contiguous: [tokens, features] with ``order``, else [rows, features].
        order: the pair of each row, of the token ``pair // top_k``; None for rows in their order.
    """
    width = values.shape[1]
    rows = len(values) if order is None else len(order)
    blocks, places, device = triton.cdiv(width, BLOCK), tables.most * TILE, values.device
    row = row_scale = col = col_scale = None
    if rowwise:
        row = torch.empty(rows, width, dtype=fmt.dtype, device=device)
        row_scale = torch.empty(blocks, rows, dtype=torch.float32, device=device)
    if columnwise:
        col = torch.empty(width, places, dtype=fmt.dtype, device=device)
        col_scale = torch.empty(tables.most, width, dtype=torch.float32, device=device)
    some, scale = (row, row_scale) if row is not None else (col, col_scale)
    with torch.cuda.device(device):
        _quantize_kernel[(tables.most * blocks,)](
            values, values if order is None else order, tables.tiles, tables.total, tables.owners, some,
            scale if row_scale is None else row_scale, some if col is None else col,
            scale if col_scale is None else col_scale, rows, width, places, top_k,
            GATHER=order is not None, FP8_MAX=fmt.max, ROWWISE=rowwise, COLUMNWISE=columnwise, SIZE=BLOCK, num_warps=8,
        )  # fmt: skip
    return Quantized(row, row_scale, col, col_scale)


@triton.jit
def _grouped_rows_in_blocks_kernel(
    a_desc, b_desc, out_ptr, tiles_ptr, total_ptr, owners_ptr, a_scale_ptr, b_scale_ptr, rows, experts, outs,
    contracted, row_step, col_step, b_line,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PROGRAMS: tl.constexpr,
):  # fmt: skip
    across = tl.cdiv(outs, BN)
    for t in tl.range(tl.program_id(0), tl.load(total_ptr) * across, PROGRAMS, flatten=True):
        expert, row, col, end = tile_of(t, across, tiles_ptr, owners_ptr, BM, BN)
        m = row + tl.arange(0, BM)
        n = col + tl.arange(0, BN)
        squares = b_scale_ptr + (expert * row_step + col) // BK * b_line + expert * col_step // BK
        sums = tl.zeros((BM, BN), tl.float32)
        for k in range(0, contracted, BK):
            a = a_desc.load([row, k])
            b = b_desc.load([expert * row_step + col, expert * col_step + k])
            scale = tl.load(a_scale_ptr + (k // BK).to(tl.int64) * rows + m, mask=m < end, other=0.0)
            scale *= tl.load(squares + k // BK)
            sums += tl.dot(a, b.T) * scale[:, None]
        places = out_ptr + m[:, None].to(tl.int64) * outs + n[None, :]
        inside = (m < end)[:, None] & (n < outs)[None, :]
        tl.store(places, sums.to(out_ptr.dtype.element_ty), mask=inside)
    zero_rest(out_ptr, tiles_ptr, experts, rows, outs, BN, PROGRAMS)


def rows_gemm(
    a: Tensor, a_scale: Tensor, weight: Weight, contracted: int, tables: Tables, dtype: torch.dtype
) -> Tensor:
    """``triton_grouped.rows_gemm``; ``weight`` has steps that are multiples of 128, and one scale a square."""
    rows, outs = len(a), weight.outs
    out = torch.empty(rows, outs, dtype=dtype, device=a.device)
    programs = multiprocessors(a.get_device())
    with torch.cuda.device(a.device):
        _grouped_rows_in_blocks_kernel[(programs,)](
            described(a, TILE), described(weight.data, BLOCK), out, tables.tiles, tables.total, tables.owners, a_scale,
            weight.scale_inv, rows, len(tables.tiles) // 4, outs, contracted, weight.row_step, weight.col_step,
            weight.scale_inv.stride(0), BM=TILE, BN=BLOCK, BK=BLOCK, PROGRAMS=programs, num_warps=8, num_stages=4,
        )  # fmt: skip
    return out


@triton.jit
def _grouped_weights_in_blocks_kernel(
    a_desc, b_desc, out_ptr, tiles_ptr, a_scale_ptr, b_scale_ptr, experts, rows, cols,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PROGRAMS: tl.constexpr,
):  # fmt: skip
    down, across = tl.cdiv(rows, BM), tl.cdiv(cols, BN)
    for t in tl.range(tl.program_id(0), experts * down * across, PROGRAMS, flatten=True):
        expert = t // (down * across)
        row = t % (down * across) // across * BM
        col = t % across * BN
        first = tl.load(tiles_ptr + expert * 4)
        count = tl.load(tiles_ptr + expert * 4 + 1)
        m = row + tl.arange(0, BM)
        n = col + tl.arange(0, BN)
        sums = tl.zeros((BM, BN), tl.float32)
        for tile in range(first, first + count):
            a = a_desc.load([row, tile * BK])
            b = b_desc.load([col, tile * BK])
            a_scale = tl.load(a_scale_ptr + tile * rows + m, mask=m < rows, other=0.0)
            b_scale = tl.load(b_scale_ptr + tile * cols + n, mask=n < cols, other=0.0)
            sums += tl.dot(a, b.T) * (a_scale[:, None] * b_scale[None, :])
        places = out_ptr + expert.to(tl.int64) * rows * cols + m[:, None].to(tl.int64) * cols + n[None, :]
        inside = (m < rows)[:, None] & (n < cols)[None, :]
        tl.store(places, sums.to(out_ptr.dtype.element_ty), mask=inside)


def weights_gemm(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, tables: Tables, dtype: torch.dtype) -> Tensor:
    """``triton_grouped.weights_gemm`` for columns in blocks."""
    (rows, _), cols, experts = a.shape, len(b), len(tables.tiles) // 4
    out = torch.empty(experts, rows, cols, dtype=dtype, device=a.device)
    programs = multiprocessors(a.get_device())
    with torch.cuda.device(a.device):
        _grouped_weights_in_blocks_kernel[(programs,)](
            described(a, TILE), described(b, BLOCK), out, tables.tiles, a_scale, b_scale, experts, rows, cols,
            BM=TILE, BN=BLOCK, BK=TILE, PROGRAMS=programs, num_warps=8, num_stages=3,
        )  # fmt: skip
    return out

"""Grouped FP8 GEMMs on Hopper: each expert's rows times the expert's own weight, in one launch and without a host sync.

Rows of one expert lie next to each other, [rows, features], and are cut into tiles of ``TILE`` rows. No row is added:
a tile at the end of an expert reads rows of the next one, and does not write them. Columnwise data, [features, places],
have ``TILE`` places for each tile, with zeros where a tile has no row, so that the GEMM of a weight's gradient, which
contracts the rows, starts each expert at a multiple of ``TILE``.

The tables of one routing, int32, made by ``make_tables``:
    tiles    [experts, 4]: an expert's first tile, number of tiles, first row, and the row behind its last
    total    [1]: number of all tiles
    owners   [tiles]: the expert of each tile
    places   [pairs]: the row of each pair of a token and an expert

Importing this file needs Triton.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

TILE = 128
_K = 128  # elements that one step of a GEMM contracts; tensor cores that keep few bits add as many before FP32 does
_CHUNK = 1024


class Tables(NamedTuple):
    """The tables of this module's docstring; ``most`` is an upper bound of ``total``, from the shapes alone."""

    tiles: Tensor
    total: Tensor
    owners: Tensor
    places: Tensor
    most: int


class Weight(NamedTuple):
    """The weights of all experts as the B operand of a GEMM, whose last dimension is contracted.

    Attributes:
        data: FP8, 2-D, contiguous in its last dimension.
        scale_inv: FP32 [1].
        row_step, col_step: from an expert's matrix [outs, contracted] to the next one's: rows, or columns.
        outs: features of a result.
    """

    data: Tensor
    scale_inv: Tensor
    row_step: int
    col_step: int
    outs: int


@triton.jit
def _tables_kernel(
    order_ptr, ends_ptr, tiles_ptr, total_ptr, owners_ptr, places_ptr, experts, pairs,
    EXPERTS: tl.constexpr, TILE: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    if pid > 0:
        row = (pid - 1) * CHUNK + tl.arange(0, CHUNK)
        pair = tl.load(order_ptr + row, mask=row < pairs, other=0)
        tl.store(places_ptr + pair, row, mask=row < pairs)
    else:
        e = tl.arange(0, EXPERTS)
        inside = e < experts
        end = tl.load(ends_ptr + e, mask=inside, other=0)
        start = tl.load(ends_ptr + e - 1, mask=inside & (e > 0), other=0)
        count = tl.where(inside, (end - start + TILE - 1) // TILE, 0)
        first = tl.cumsum(count) - count
        tl.store(tiles_ptr + e * 4, first, mask=inside)
        tl.store(tiles_ptr + e * 4 + 1, count, mask=inside)
        tl.store(tiles_ptr + e * 4 + 2, start, mask=inside)
        tl.store(tiles_ptr + e * 4 + 3, end, mask=inside)
        tl.store(total_ptr, tl.sum(count))
        for i in range(tl.max(count)):
            tl.store(owners_ptr + first + i, e, mask=i < count)


def make_tables(order: Tensor, ends: Tensor) -> Tables:
    """The tables of a routing.

    Args:
        order: int64 [pairs]: the pair of each row.
        ends: int32 [experts]: the row behind the last one of each expert.
    """
    experts, pairs = len(ends), len(order)
    most = pairs // TILE + min(experts, pairs)
    sizes = [experts * 4, 1, most, pairs]
    tiles, total, owners, places = torch.empty(sum(sizes), dtype=torch.int32, device=ends.device).split(sizes)
    with torch.cuda.device(ends.device):
        _tables_kernel[(1 + triton.cdiv(pairs, _CHUNK),)](
            order, ends, tiles, total, owners, places, experts, pairs,
            EXPERTS=triton.next_power_of_2(experts), TILE=TILE, CHUNK=_CHUNK, num_warps=4,
        )  # fmt: skip
    return Tables(tiles, total, owners, places, most)


@triton.jit
def tile_of(t, across, tiles_ptr, owners_ptr, BM: tl.constexpr, BN: tl.constexpr):
    """(expert, first row, first column, end of the expert's rows) of the tile ``t`` of a result.

    The tiles of one expert follow each other, down first: the expert's weight is read from memory once.
    """
    expert = tl.load(owners_ptr + t // across)
    first = tl.load(tiles_ptr + expert * 4)
    count = tl.load(tiles_ptr + expert * 4 + 1)
    start = tl.load(tiles_ptr + expert * 4 + 2)
    end = tl.load(tiles_ptr + expert * 4 + 3)
    place = t - first * across
    return expert, start + place % count * BM, place // count * BN, end


@triton.jit
def zero_rest(out_ptr, tiles_ptr, experts, rows, outs, BN: tl.constexpr, PROGRAMS: tl.constexpr):
    """Write zeros to the rows of a result [rows, outs] that belong to no expert."""
    for row in range(tl.load(tiles_ptr + experts * 4 - 1) + tl.program_id(0), rows, PROGRAMS):
        for col in range(0, outs, BN):
            n = col + tl.arange(0, BN)
            zeros = tl.zeros((BN,), out_ptr.dtype.element_ty)
            tl.store(out_ptr + tl.cast(row, tl.int64) * outs + n, zeros, mask=n < outs)


@triton.jit
def _grouped_rows_kernel(
    a_desc, b_desc, out_ptr, tiles_ptr, total_ptr, owners_ptr, a_scale_ptr, b_scale_ptr, rows, experts, outs,
    contracted, row_step, col_step,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PROGRAMS: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    across = tl.cdiv(outs, BN)
    scale = tl.load(a_scale_ptr) * tl.load(b_scale_ptr)
    for t in tl.range(tl.program_id(0), tl.load(total_ptr) * across, PROGRAMS, flatten=True):
        expert, row, col, end = tile_of(t, across, tiles_ptr, owners_ptr, BM, BN)
        sums = tl.zeros((BM, BN), tl.float32)
        for k in range(0, contracted, BK):
            a = a_desc.load([row, k])
            b = b_desc.load([expert * row_step + col, expert * col_step + k])
            sums = tl.dot(a, b.T, sums, max_num_imprecise_acc=BK if EXACT else None)
        m = row + tl.arange(0, BM)
        n = col + tl.arange(0, BN)
        places = out_ptr + m[:, None].to(tl.int64) * outs + n[None, :]
        inside = (m < end)[:, None] & (n < outs)[None, :]
        tl.store(places, (sums * scale).to(out_ptr.dtype.element_ty), mask=inside)
    zero_rest(out_ptr, tiles_ptr, experts, rows, outs, BN, PROGRAMS)


def rows_gemm(
    a: Tensor, scale_inv: Tensor, weight: Weight, contracted: int, tables: Tables, dtype: torch.dtype, exact: bool
) -> Tensor:
    """Each row of ``a`` [rows, contracted] times the weight of the row's expert: half [rows, ``weight.outs``].

    Rows of no expert are zero.

    Args:
        exact: whether sums of more than 128 products are added in FP32, and not in the tensor cores.
    """
    rows, outs = len(a), weight.outs
    bn = 128 if exact or outs <= 128 else 256
    out = torch.empty(rows, outs, dtype=dtype, device=a.device)
    programs = multiprocessors(a.get_device())
    with torch.cuda.device(a.device):
        _grouped_rows_kernel[(programs,)](
            described(a, TILE), described(weight.data, bn), out, tables.tiles, tables.total, tables.owners, scale_inv,
            weight.scale_inv, rows, len(tables.tiles) // 4, outs, contracted, weight.row_step, weight.col_step,
            BM=TILE, BN=bn, BK=_K, PROGRAMS=programs, EXACT=exact, num_warps=8,
            num_stages=4 if exact or contracted <= 2048 else 3,
        )  # fmt: skip
    return out


@triton.jit
def _grouped_weights_kernel(
    a_desc, b_desc, out_ptr, tiles_ptr, a_scale_ptr, b_scale_ptr, experts, rows, cols,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PROGRAMS: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    down, across = tl.cdiv(rows, BM), tl.cdiv(cols, BN)
    scale = tl.load(a_scale_ptr) * tl.load(b_scale_ptr)
    for t in tl.range(tl.program_id(0), experts * down * across, PROGRAMS, flatten=True):
        expert = t // (down * across)
        row = t % (down * across) // across * BM
        col = t % across * BN
        first = tl.load(tiles_ptr + expert * 4) * BK
        count = tl.load(tiles_ptr + expert * 4 + 1)
        sums = tl.zeros((BM, BN), tl.float32)
        for k in range(0, count * BK, BK):
            a = a_desc.load([row, first + k])
            b = b_desc.load([col, first + k])
            sums = tl.dot(a, b.T, sums, max_num_imprecise_acc=BK if EXACT else None)
        m = row + tl.arange(0, BM)
        n = col + tl.arange(0, BN)
        places = out_ptr + expert.to(tl.int64) * rows * cols + m[:, None].to(tl.int64) * cols + n[None, :]
        inside = (m < rows)[:, None] & (n < cols)[None, :]
        tl.store(places, (sums * scale).to(out_ptr.dtype.element_ty), mask=inside)


def weights_gemm(
    a: Tensor, a_scale_inv: Tensor, b: Tensor, b_scale_inv: Tensor, tables: Tables, dtype: torch.dtype, exact: bool
) -> Tensor:
    """``a`` [M, places] times ``b`` [N, places], contracted over the places of each expert: [experts, M, N].

    The result of an expert without rows is zero.
    """
    (rows, _), cols, experts = a.shape, len(b), len(tables.tiles) // 4
    bn = 128 if cols <= 128 else 256
    out = torch.empty(experts, rows, cols, dtype=dtype, device=a.device)
    programs = multiprocessors(a.get_device())
    with torch.cuda.device(a.device):
        _grouped_weights_kernel[(programs,)](
            described(a, TILE), described(b, bn), out, tables.tiles, a_scale_inv, b_scale_inv, experts, rows, cols,
            BM=TILE, BN=bn, BK=TILE, PROGRAMS=programs, EXACT=exact, num_warps=16 if exact else 8, num_stages=3,
        )  # fmt: skip
    return out


@cache
def multiprocessors(device: int) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def described(data: Tensor, rows: int) -> Any:
    """How the copy engine reads ``data`` [rows, contracted] in tiles."""
    return TensorDescriptor(data, list(data.shape), list(data.stride()), [rows, _K])

"""Gathers rows, computes gates and adds rows up between the grouped GEMMs of ``triton_grouped``, and quantizes.

A kernel that quantizes writes the rowwise data [rows, features], and the columnwise data [features, places] with zeros
in places without a row. Numerics are those of ``compute.experts.gemms``: a gate is computed as ``triton_activations``
does, its half result times the routing's weight is rounded to half once more, and then quantized.

Importing this file needs Triton.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from nemo_lowprec.formats.floats import FloatFormat
from nemo_lowprec.kernels.triton_activations import KINDS, _product, _round, _value_and_slope, _wide
from nemo_lowprec.kernels.triton_cast import raise_amax, saturate
from nemo_lowprec.kernels.triton_grouped import TILE, Tables

_ROWS, _COLS, _WARPS = 64, 128, 8  # of one program; _ROWS divides TILE
_BACKWARD_COLS = 64


class Quantized(NamedTuple):
    """FP8 rows [rows, features], columns [features, places], and 1 / scale, FP32 [1]; None for an unread form."""

    row: Tensor | None
    col: Tensor | None
    scale_inv: Tensor


@triton.jit
def _tile_rows(tiles_ptr, total_ptr, owners_ptr, pid, ROWS: tl.constexpr, TILE: tl.constexpr):
    """Of a program: whether there is a tile, its first row, the number of rows that are left, and its first place."""
    tile = pid // (TILE // ROWS)
    within = pid % (TILE // ROWS) * ROWS
    there = tile < tl.load(total_ptr)
    expert = tl.load(owners_ptr + tile, mask=there, other=0)
    first = tl.load(tiles_ptr + expert * 4)
    start = tl.load(tiles_ptr + expert * 4 + 2)
    end = tl.load(tiles_ptr + expert * 4 + 3)
    row = start + (tile - first) * TILE + within
    return there, row, end - row, tile * TILE + within


@triton.jit
def _write(
    q, row_ptr, col_ptr, row, place, col, left, m, n, width, places, stride, first,
    ROWWISE: tl.constexpr, COLUMNWISE: tl.constexpr,
):  # fmt: skip
    """Write an FP8 tile, zero where there is no row, of ``width`` features that begin at ``first`` of ``stride``."""
    if ROWWISE:
        where = row_ptr + (row + m)[:, None].to(tl.int64) * stride + (first + col + n)[None, :]
        tl.store(where, q, mask=(m < left)[:, None] & (col + n < width)[None, :])
    if COLUMNWISE:
        where = col_ptr + (first + col + n)[:, None].to(tl.int64) * places + (place + m)[None, :]
        tl.store(where, tl.trans(q), mask=(col + n < width)[:, None] & (m < places)[None, :])


@triton.jit
def _gather_kernel(
    x_ptr, order_ptr, tiles_ptr, total_ptr, owners_ptr, row_ptr, col_ptr, scale_ptr, scale_inv_ptr, amax_ptr,
    width, places, top_k,
    GATHER: tl.constexpr, SCALED: tl.constexpr, FP8_MAX: tl.constexpr, ROWWISE: tl.constexpr,
    COLUMNWISE: tl.constexpr, RECORD: tl.constexpr, TILE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    across = tl.cdiv(width, BN)
    pid = tl.program_id(0)
    there, row, left, place = _tile_rows(tiles_ptr, total_ptr, owners_ptr, pid // across, BM, TILE)
    if not there:
        return
    m, n = tl.arange(0, BM), tl.arange(0, BN)
    col = pid % across * BN
    inside = (m < left)[:, None] & (col + n < width)[None, :]
    source = row + m
    if GATHER:
        source = tl.load(order_ptr + row + m, mask=m < left, other=0) // top_k
    x = tl.load(x_ptr + source[:, None].to(tl.int64) * width + (col + n)[None, :], mask=inside, other=0.0)
    if SCALED:
        x = x.to(tl.float32)
        if RECORD:
            raise_amax(amax_ptr.to(tl.pointer_type(tl.int32), bitcast=True), x)
        scale = tl.load(scale_ptr)
        if pid == 0:
            tl.store(scale_inv_ptr, tl.div_rn(tl.full((), 1.0, tl.float32), scale))
        q = saturate(x * scale, FP8_MAX).to(row_ptr.dtype.element_ty)
    else:
        q = x
    _write(q, row_ptr, col_ptr, row, place, col, left, m, n, width, places, width, 0, ROWWISE, COLUMNWISE)


def gather(
    tokens: Tensor, scale_inv: Tensor, order: Tensor, top_k: int, tables: Tables, rowwise: bool, columnwise: bool
) -> Quantized:
    """The rows of ``tokens``, FP8 [tokens, features], in the order of the pairs ``order`` // ``top_k``."""
    rows, width = len(order), tokens.shape[1]
    made = _allocate(tokens, rows, width, tokens.dtype, tables, rowwise, columnwise)
    as_bytes = [t if t is None else t.view(torch.uint8) for t in (tokens, made[0], made[1])]
    _launch_rows(
        as_bytes[0], order, as_bytes[1], as_bytes[2], None, scale_inv, None, width, top_k, tables,
        GATHER=True, SCALED=False, FP8_MAX=0.0,
    )  # fmt: skip
    return Quantized(*made, scale_inv)


def quantize(
    values: Tensor, scale: Tensor, fmt: FloatFormat, record: Tensor | None, tables: Tables, rowwise: bool,
    columnwise: bool,
) -> Quantized:  # fmt: skip
    """Half [rows, features] quantized with ``scale`` FP32 [1]; ``record`` is raised to the amax of all rows."""
    rows, width = values.shape
    made = _allocate(values, rows, width, fmt.dtype, tables, rowwise, columnwise)
    scale_inv = torch.empty_like(scale)
    _launch_rows(
        values, values, *made, scale, scale_inv, record, width, 1, tables, GATHER=False, SCALED=True, FP8_MAX=fmt.max
    )
    return Quantized(*made, scale_inv)


def _launch_rows(x, order, row, col, scale, scale_inv, record, width, top_k, tables, **how) -> None:  # type: ignore[no-untyped-def]
    place = row if row is not None else col
    with torch.cuda.device(x.device):
        _gather_kernel[(_programs(tables, width, _COLS),)](
            x, order, tables.tiles, tables.total, tables.owners, place if row is None else row,
            place if col is None else col, scale_inv if scale is None else scale, scale_inv,
            scale_inv if record is None else record, width, tables.most * TILE, top_k,
            ROWWISE=row is not None, COLUMNWISE=col is not None, RECORD=record is not None, TILE=TILE, BM=_ROWS,
            BN=_COLS, num_warps=_WARPS, **how,
        )  # fmt: skip


@triton.jit
def _gate_kernel(
    h_ptr, factor_ptr, tiles_ptr, total_ptr, owners_ptr, row_ptr, col_ptr, scale_ptr, scale_inv_ptr, amax_ptr,
    width, places, h_width, gate_first, up_first,
    KIND: tl.constexpr, GATED: tl.constexpr, FP8_MAX: tl.constexpr, ROWWISE: tl.constexpr, COLUMNWISE: tl.constexpr,
    RECORD: tl.constexpr, TILE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    across = tl.cdiv(width, BN)
    pid = tl.program_id(0)
    there, row, left, place = _tile_rows(tiles_ptr, total_ptr, owners_ptr, pid // across, BM, TILE)
    if not there:
        return
    m, n = tl.arange(0, BM), tl.arange(0, BN)
    col = pid % across * BN
    half = h_ptr.dtype.element_ty
    inside = (m < left)[:, None] & (col + n < width)[None, :]
    where = h_ptr + (row + m)[:, None].to(tl.int64) * h_width + (col + n)[None, :]
    x = tl.load(where + gate_first, mask=inside, other=0.0)
    value, _ = _value_and_slope(_wide(x, PACKED), KIND, half == tl.float16)
    y = _round(value, half, PACKED)
    if GATED:
        y = _product(y, tl.load(where + up_first, mask=inside, other=0.0), PACKED)
    factor = tl.load(factor_ptr + row + m, mask=m < left, other=0.0)
    y = _round(_wide(y, PACKED) * factor[:, None], half, PACKED)
    x = y.to(tl.float32)
    if RECORD:
        raise_amax(amax_ptr.to(tl.pointer_type(tl.int32), bitcast=True), x)
    scale = tl.load(scale_ptr)
    if pid == 0:
        tl.store(scale_inv_ptr, tl.div_rn(tl.full((), 1.0, tl.float32), scale))
    q = saturate(x * scale, FP8_MAX).to(row_ptr.dtype.element_ty)
    _write(q, row_ptr, col_ptr, row, place, col, left, m, n, width, places, width, 0, ROWWISE, COLUMNWISE)


def gate(
    kind: str, form: str, h: Tensor, factor: Tensor, scale: Tensor, fmt: FloatFormat, record: Tensor | None,
    tables: Tables, rowwise: bool, columnwise: bool,
) -> Quantized:  # fmt: skip
    """The gate's values of half ``h`` times ``factor`` FP32 [rows], quantized; ``form`` is an ``Activation``'s."""
    width = h.shape[1] // (1 if form == "plain" else 2)
    row, col = _allocate(h, len(h), width, fmt.dtype, tables, rowwise, columnwise)
    scale_inv, place = torch.empty_like(scale), row if row is not None else col
    with torch.cuda.device(h.device):
        _gate_kernel[(_programs(tables, width, _COLS),)](
            h, factor, tables.tiles, tables.total, tables.owners, place if row is None else row,
            place if col is None else col, scale, scale_inv, scale if record is None else record, width,
            tables.most * TILE, h.shape[1], *_firsts(form, width),
            KIND=KINDS.index(kind), GATED=form != "plain", FP8_MAX=fmt.max, ROWWISE=rowwise, COLUMNWISE=columnwise,
            RECORD=record is not None, TILE=TILE, BM=_ROWS, BN=_COLS, PACKED=True, num_warps=_WARPS,
        )  # fmt: skip
    return Quantized(row, col, scale_inv)


@triton.jit
def _gate_backward_kernel(
    grad_ptr, h_ptr, factor_ptr, tiles_ptr, total_ptr, owners_ptr, row_ptr, col_ptr, scale_ptr, scale_inv_ptr,
    amax_ptr, dfactor_ptr, dh_ptr, width, places, rows, h_width, gate_first, up_first,
    KIND: tl.constexpr, GATED: tl.constexpr, FP8_MAX: tl.constexpr, ROWWISE: tl.constexpr, COLUMNWISE: tl.constexpr,
    RECORD: tl.constexpr, HALF: tl.constexpr, TILE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    PACKED: tl.constexpr,
):  # fmt: skip
    across = tl.cdiv(width, BN)
    pid = tl.program_id(0)
    there, row, left, place = _tile_rows(tiles_ptr, total_ptr, owners_ptr, pid // across, BM, TILE)
    if not there:
        return
    m, n = tl.arange(0, BM), tl.arange(0, BN)
    col = pid % across * BN
    half = h_ptr.dtype.element_ty
    inside = (m < left)[:, None] & (col + n < width)[None, :]
    line = (row + m)[:, None].to(tl.int64)
    where = h_ptr + line * h_width + (col + n)[None, :]
    grad = tl.load(grad_ptr + line * width + (col + n)[None, :], mask=inside, other=0.0)
    x = tl.load(where + gate_first, mask=inside, other=0.0)
    factor = tl.load(factor_ptr + row + m, mask=m < left, other=0.0)
    value, slope = _value_and_slope(_wide(x, PACKED), KIND, half == tl.float16)
    act = _round(value, half, PACKED)
    dy = _round(_wide(grad, PACKED) * factor[:, None], half, PACKED)
    scale = tl.load(scale_ptr)
    if pid == 0:
        tl.store(scale_inv_ptr, tl.div_rn(tl.full((), 1.0, tl.float32), scale))
    y = act
    dx = dy
    if GATED:
        up = tl.load(where + up_first, mask=inside, other=0.0)
        y = _product(act, up, PACKED)
        dx = _product(dy, up, PACKED)
        dup = _product(dy, act, PACKED)
        wide = dup.to(tl.float32)
        if RECORD:
            raise_amax(amax_ptr.to(tl.pointer_type(tl.int32), bitcast=True), wide)
        if HALF:
            tl.store(dh_ptr + line * h_width + (col + n)[None, :] + up_first, dup, mask=inside)
        q = saturate(wide * scale, FP8_MAX).to(row_ptr.dtype.element_ty)
        _write(q, row_ptr, col_ptr, row, place, col, left, m, n, width, places, h_width, up_first, ROWWISE, COLUMNWISE)
    dfactor = tl.sum(_wide(grad, PACKED) * _wide(y, PACKED), axis=1)
    tl.store(dfactor_ptr + (pid % across).to(tl.int64) * rows + row + m, dfactor, mask=m < left)
    if KIND == 3:
        dgate = tl.where(_wide(x, PACKED) <= 0.0, 0.0, _wide(dx, PACKED))
    else:
        dgate = _wide(dx, PACKED) * slope
    dgate = _round(dgate, half, PACKED)
    wide = dgate.to(tl.float32)
    if RECORD:
        raise_amax(amax_ptr.to(tl.pointer_type(tl.int32), bitcast=True), wide)
    if HALF:
        tl.store(dh_ptr + line * h_width + (col + n)[None, :] + gate_first, dgate, mask=inside)
    q = saturate(wide * scale, FP8_MAX).to(row_ptr.dtype.element_ty)
    _write(q, row_ptr, col_ptr, row, place, col, left, m, n, width, places, h_width, gate_first, ROWWISE, COLUMNWISE)


def gate_backward(
    kind: str, form: str, grad: Tensor, h: Tensor, factor: Tensor, scale: Tensor, fmt: FloatFormat,
    record: Tensor | None, tables: Tables, rowwise: bool, columnwise: bool, half: bool,
) -> tuple[Quantized, Tensor | None, Tensor]:  # fmt: skip
    """The gradient of ``h``, quantized and with ``half`` as it is, and that of ``factor``, FP32 [rows].

    Args:
        grad: half, contiguous, of the gate's values times ``factor``.
    """
    rows, h_width = h.shape
    width = h_width // (1 if form == "plain" else 2)
    row, col = _allocate(h, rows, h_width, fmt.dtype, tables, rowwise, columnwise)
    dh = torch.zeros_like(h) if half else None
    dfactor = torch.zeros(triton.cdiv(width, _BACKWARD_COLS), rows, dtype=torch.float32, device=h.device)
    scale_inv, place = torch.empty_like(scale), row if row is not None else col
    place = h if place is None else place
    with torch.cuda.device(h.device):
        _gate_backward_kernel[(_programs(tables, width, _BACKWARD_COLS),)](
            grad, h, factor, tables.tiles, tables.total, tables.owners, place if row is None else row,
            place if col is None else col, scale, scale_inv, scale if record is None else record, dfactor,
            h if dh is None else dh, width, tables.most * TILE, rows, h_width, *_firsts(form, width),
            KIND=KINDS.index(kind), GATED=form != "plain", FP8_MAX=fmt.max, ROWWISE=row is not None,
            COLUMNWISE=col is not None, RECORD=record is not None, HALF=half, TILE=TILE, BM=_ROWS, BN=_BACKWARD_COLS,
            PACKED=True, num_warps=_WARPS,
        )  # fmt: skip
    return Quantized(row, col, scale_inv), dh, dfactor.sum(0)


@triton.jit
def _combine_kernel(
    rows_ptr, places_ptr, ends_ptr, out_ptr, width, last, TOP_K: tl.constexpr, BN: tl.constexpr
):  # fmt: skip
    across = tl.cdiv(width, BN)
    token = (tl.program_id(0) // across).to(tl.int64)
    n = tl.program_id(0) % across * BN + tl.arange(0, BN)
    end = tl.load(ends_ptr + last)
    total = tl.zeros((BN,), tl.float32)
    for choice in tl.static_range(TOP_K):
        row = tl.load(places_ptr + token * TOP_K + choice)
        there = (n < width) & (row < end)
        total += tl.load(rows_ptr + row.to(tl.int64) * width + n, mask=there, other=0.0).to(tl.float32)
    tl.store(out_ptr + token * width + n, total.to(out_ptr.dtype.element_ty), mask=n < width)


def combine(rows: Tensor, ends: Tensor, top_k: int, tables: Tables, dtype: torch.dtype) -> Tensor:
    """The sums [tokens, features] of the rows of each token, added in FP32 in the order of the token's experts."""
    width, tokens = rows.shape[1], len(rows) // top_k
    out = torch.empty(tokens, width, dtype=dtype, device=rows.device)
    block = min(triton.next_power_of_2(width), 1024)
    with torch.cuda.device(rows.device):
        _combine_kernel[(tokens * triton.cdiv(width, block),)](
            rows, tables.places, ends, out, width, len(ends) - 1, TOP_K=top_k, BN=block, num_warps=4
        )
    return out


def _allocate(
    like: Tensor, rows: int, width: int, dtype: torch.dtype, tables: Tables, rowwise: bool, columnwise: bool
) -> tuple[Tensor | None, Tensor | None]:
    row = torch.empty(rows, width, dtype=dtype, device=like.device) if rowwise else None
    col = torch.empty(width, tables.most * TILE, dtype=dtype, device=like.device) if columnwise else None
    return row, col


def _programs(tables: Tables, width: int, cols: int) -> int:
    return tables.most * (TILE // _ROWS) * triton.cdiv(width, cols)


def _firsts(form: str, width: int) -> tuple[int, int]:
    """The first features of the gate, and of what the gate is multiplied with."""
    return {"plain": (0, 0), "gate_up": (0, width), "up_gate": (width, 0)}[form]

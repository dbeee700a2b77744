"""Joins the gradients of a layer's parts, such as q, k and v, to the gradient of its output, and quantizes that.

Importing this file needs Triton.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from nemo_lowprec.formats.floats import FloatFormat
from nemo_lowprec.kernels.launcher import Launcher
from nemo_lowprec.kernels.memory import new
from nemo_lowprec.kernels.triton_cast import raise_amax
from nemo_lowprec.kernels.triton_sums import add_up

_TILE_ROWS, _TILE_COLS, _WARPS = 64, 64, 4
_INT32 = 2**31


@triton.jit
def _load_part(x_ptr, batch, place, stride_b, stride_n, stride_h, c, inside, DIM: tl.constexpr):
    row = x_ptr + batch * stride_b + place * stride_n
    return tl.load(row[:, None] + ((c // DIM).to(tl.int64) * stride_h + c % DIM)[None, :], mask=inside, other=0.0)


@triton.jit(
    do_not_specialize=["seq"],
    do_not_specialize_on_alignment=["scale_ptr", "scale_inv_ptr", "amax_ptr", "sums_ptr"],
)
def _join_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    scale_ptr,
    scale_inv_ptr,
    row_ptr,
    col_ptr,
    amax_ptr,
    sums_ptr,
    rows,
    seq,
    q_b,
    q_n,
    q_h,
    k_b,
    k_n,
    k_h,
    v_b,
    v_n,
    v_h,
    WIDTH: tl.constexpr,
    DIM: tl.constexpr,
    QUANTIZE: tl.constexpr,
    ROWWISE: tl.constexpr,
    COLUMNWISE: tl.constexpr,
    RECORD: tl.constexpr,
    SUMS: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
):
    TILES: tl.constexpr = (WIDTH + BN - 1) // BN  # of one part
    pid = tl.program_id(0).to(tl.int64)
    tile_m, tile = pid // (3 * TILES), pid % (3 * TILES)
    part = tile // TILES
    m = tile_m * BM + tl.arange(0, BM)
    c = (tile % TILES).to(tl.int32) * BN + tl.arange(0, BN)
    inside = (m < rows)[:, None] & (c < WIDTH)[None, :]
    batch, place = m // seq, m % seq
    if part == 0:
        half = _load_part(q_ptr, batch, place, q_b, q_n, q_h, c, inside, DIM)
    elif part == 1:
        half = _load_part(k_ptr, batch, place, k_b, k_n, k_h, c, inside, DIM)
    else:
        half = _load_part(v_ptr, batch, place, v_b, v_n, v_h, c, inside, DIM)
    n = part * WIDTH + c
    COLS: tl.constexpr = 3 * WIDTH
    tl.store(out_ptr + m[:, None] * COLS + n[None, :], half, mask=inside)
    if QUANTIZE:  # as _cast_kernel does
        x = half.to(tl.float32)
        if RECORD:
            raise_amax(amax_ptr.to(tl.pointer_type(tl.int32), bitcast=True), x)
        if SUMS:
            tl.store(sums_ptr + tile_m * COLS + n, tl.sum(x, axis=0), mask=c < WIDTH)
        scale = tl.load(scale_ptr)
        if pid == 0:
            tl.store(scale_inv_ptr, tl.div_rn(tl.full((), 1.0, tl.float32), scale))
        quantized = (x * scale).to(row_ptr.dtype.element_ty)
        if ROWWISE:
            tl.store(row_ptr + m[:, None] * COLS + n[None, :], quantized, mask=inside)
        if COLUMNWISE:
            there = (c < WIDTH)[:, None] & (m < rows)[None, :]
            tl.store(col_ptr + n[:, None] * rows + m[None, :], tl.trans(quantized), mask=there)


_join = Launcher(_join_kernel, num_warps=_WARPS)


def fits(parts: Sequence[Tensor]) -> bool:
    """Whether the kernel takes these gradients, [batch, tokens, heads, dim] each."""
    first = parts[0]
    return (
        len(parts) == 3
        and first.is_cuda
        and first.numel() > 0
        and first.dtype in (torch.float16, torch.bfloat16)
        and all(t.shape == first.shape and t.dtype == first.dtype and t.stride(3) == 1 for t in parts)
    )


def join(parts: Sequence[Tensor]) -> Tensor:
    """The gradients side by side: [batch, tokens, 3 * heads * dim], contiguous, of three that ``fits`` allows."""
    out, *_ = _launch(parts, None, None, False, False, None, False)
    return out


def join_quantized(
    parts: Sequence[Tensor],
    scale: Tensor,
    fmt: FloatFormat,
    rowwise: bool,
    columnwise: bool,
    record: Tensor | None,
    sums: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor, Tensor | None]:
    """``join``, and the result quantized as ``triton_cast.quantize`` does it.

    Args:
        scale: FP32 [1].
        record: FP32 [1], raised to the amax.
        sums: whether to add up the columns.

    Returns:
        The joined gradients; their FP8 values [batch * tokens, features], and the transpose (None where not wanted);
        1 / scale, FP32 [1]; and the sums of the columns, FP32 [features].
    """
    return _launch(parts, scale, fmt, rowwise, columnwise, record, sums)


def _launch(
    parts: Sequence[Tensor], scale: Tensor | None, fmt: FloatFormat | None, rowwise: bool, columnwise: bool,
    record: Tensor | None, sums: bool, tile: tuple[int, int] = (_TILE_ROWS, _TILE_COLS),
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor, Tensor | None]:  # fmt: skip
    q = parts[0]
    batch, tokens, heads, dim = q.shape
    rows, width = batch * tokens, heads * dim
    out = q.new_empty(batch, tokens, 3 * width)
    row = q.new_empty(rows, 3 * width, dtype=fmt.dtype) if rowwise and fmt is not None else None
    col = q.new_empty(3 * width, rows, dtype=fmt.dtype) if columnwise and fmt is not None else None
    device, (tile_rows, tile_cols) = q.get_device(), tile
    tiles = -(-rows // tile_rows)
    added = torch.empty(1, tiles, 3 * width, dtype=torch.float32, device=q.device) if sums else None
    scale_inv = out if scale is None else new(device, (1,), torch.float32)
    unread = out if scale is None else scale
    strides = [s for part in parts for s in part.stride()[:3]]
    key = None
    even = all(t.data_ptr() % 16 == 0 for t in parts) and rows % 16 == 0 and width % 16 == 0
    if even and all(s % 16 == 0 and s < _INT32 for s in strides):
        key = (
            q.dtype, heads, dim, None if fmt is None else fmt.dtype, rowwise, columnwise, record is not None, sums,
            tile,
        )  # fmt: skip
    either = row if row is not None else col if col is not None else out
    _join(
        device, key, tiles * 3 * -(-width // tile_cols),
        (
            *parts, out, unread, scale_inv, either, either if col is None else col,
            unread if record is None else record, unread if added is None else added, rows, tokens, *strides,
        ),
        lambda: {
            "WIDTH": width, "DIM": dim, "QUANTIZE": scale is not None,
            "ROWWISE": rowwise, "COLUMNWISE": columnwise, "RECORD": record is not None, "SUMS": sums,
            "BM": tile_rows, "BN": tile_cols,
        },
    )  # fmt: skip
    return out, row, col, scale_inv, None if added is None else add_up(added)[0]

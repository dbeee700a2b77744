"""Sums of the errors of rounding, added up on a GPU in one launch, without a host sync.

``formats.errors.add_errors`` defines the sums, and adds in FP64; here a program adds up to some ten thousand values in
FP32 before it adds in FP64. Where the tiles of a matrix have room for more than ``_ALL`` values, every n-th tile alone
counts for ``nonzero``, ``underflowed``, ``signal``, ``noise`` and ``amin``: the arithmetic of all tiles takes longer
than reading them. All values count for ``count``, ``saturated``, ``nonfinite`` and ``amax``, which a single value may
change.
Importing this file needs Triton.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from nemo_lowprec.kernels.launcher import Launcher

_TM, _TN = 16, 128  # of a tile, which lies in one block of scales along a row
_ALL = 2**22
# Two for each multiprocessor of an H100 or H200, which run at once; each goes down some tiles of one column of tiles.
# All programs add to the same numbers, one after the other: more programs wait longer than they read.
_PROGRAMS = 264
_WARPS = 8


@triton.jit
def _joined(
    nonzero, underflowed, saturated, nonfinite, signal, noise, largest, smallest,
    nonzero_b, underflowed_b, saturated_b, nonfinite_b, signal_b, noise_b, largest_b, smallest_b,
):  # fmt: skip
    """Sums and extremes of two parts of a tile: one reduction takes less time than eight."""
    return (
        nonzero + nonzero_b, underflowed + underflowed_b, saturated + saturated_b, nonfinite + nonfinite_b,
        signal + signal_b, noise + noise_b, tl.maximum(largest, largest_b), tl.minimum(smallest, smallest_b),
    )  # fmt: skip


@triton.jit
def _values(x_ptr, m, x_m, columns, rows, inside_n):
    """FP32 values of a tile; zeros outside of the matrix."""
    inside = (m < rows)[:, None] & inside_n[None, :]
    return tl.load(x_ptr + m[:, None].to(tl.int64) * x_m + columns, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _scales(scale_ptr, m, s_m, rows, BLOCK_ROWS: tl.constexpr, EXPONENTS: tl.constexpr):
    """scale_inv of the rows of a tile."""
    block = m // BLOCK_ROWS if BLOCK_ROWS else m * 0
    scale = tl.load(scale_ptr + block.to(tl.int64) * s_m, mask=m < rows, other=0)
    if EXPONENTS:
        scale = (scale.to(tl.int32) << 23).to(tl.float32, bitcast=True)
    return scale.to(tl.float32)


@triton.jit
def _add(sum_ptr, number):
    """Add a number that is not negative, unless it is 0."""
    tl.atomic_add(sum_ptr, number.to(tl.float64), mask=number != 0, sem="relaxed")


@triton.jit
def _raise(largest_ptr, number):
    """Raise the largest number. Most programs find a larger one there, and do not write."""
    tl.atomic_max(largest_ptr, number, mask=number > tl.load(largest_ptr), sem="relaxed")


@triton.jit
def _errors_kernel(
    x_ptr, q_ptr, scale_ptr, sums_ptr, extremes_ptr, rows, cols, x_m, x_n, q_m, q_n, s_m, s_n, depth, step, limit,
    BLOCK_ROWS: tl.constexpr, EXPONENTS: tl.constexpr, TM: tl.constexpr, TN: tl.constexpr,
):  # fmt: skip
    """Add the errors of the tiles of a program to the sums, and raise or lower the extremes.

    ``depth`` programs go down each column of tiles. Of ``step`` tiles of a program the first one is compared with what
    is stored. The scale of the value [m, n] is at [m // BLOCK_ROWS, n // TN] of the scales, or with 0 rows at
    [0, n // TN]; ``s_n`` is 0 for scales of whole rows.
    """
    INF: tl.constexpr = float("inf")
    column = tl.program_id(0) // depth
    n = column.to(tl.int64) * TN + tl.arange(0, TN)
    inside_n = n < cols
    x_columns, q_columns = n[None, :] * x_n, n[None, :] * q_n
    scale_ptr += column.to(tl.int64) * s_n
    scale = _scales(scale_ptr, tl.arange(0, TM), s_m, rows, BLOCK_ROWS, EXPONENTS)  # once, where all rows have one
    compared = tl.zeros([TM, TN], dtype=tl.int32)  # values that are not zero, and from bit 8 on underflows
    counted = tl.zeros([TM, TN], dtype=tl.int32)  # clipped values, and from bit 16 on values that are not finite
    signal = tl.zeros([TM, TN], dtype=tl.float32)
    noise = tl.zeros([TM, TN], dtype=tl.float32)
    largest = tl.zeros([TM, TN], dtype=tl.float32)
    smallest = tl.full([TM, TN], INF, dtype=tl.float32)
    largest_scale = tl.zeros([TM], dtype=tl.float32)
    down = depth * TM
    for first in range((tl.program_id(0) % depth) * TM, rows, down * step):
        m = first + tl.arange(0, TM)
        x = _values(x_ptr, m, x_m, x_columns, rows, inside_n)
        q = _values(q_ptr, m, q_m, q_columns, rows, inside_n)
        if BLOCK_ROWS:
            scale = _scales(scale_ptr, m, s_m, rows, BLOCK_ROWS, EXPONENTS)
        stored = q * scale[:, None]
        magnitude = tl.abs(x)
        finite = (magnitude < INF) & (tl.abs(stored) < INF)  # false for NaN
        magnitude = tl.where(finite, magnitude, 0.0)
        error = tl.where(finite, x - stored, 0.0)
        is_nonzero = magnitude > 0
        compared += tl.where(is_nonzero, 1, 0) + tl.where(is_nonzero & (stored == 0), 256, 0)
        counted += tl.where(magnitude > limit * scale[:, None], 1, 0) + tl.where(finite, 0, 65536)
        signal += magnitude * magnitude
        noise += error * error
        largest = tl.maximum(largest, magnitude)
        smallest = tl.minimum(smallest, tl.where(is_nonzero, magnitude, INF))
        largest_scale = tl.maximum(largest_scale, scale)
        for other in range(first + down, tl.minimum(first + down * step, rows), down):
            m = other + tl.arange(0, TM)
            x = _values(x_ptr, m, x_m, x_columns, rows, inside_n)
            if BLOCK_ROWS:
                scale = _scales(scale_ptr, m, s_m, rows, BLOCK_ROWS, EXPONENTS)
            magnitude = tl.abs(x)
            finite = magnitude < INF
            magnitude = tl.where(finite, magnitude, 0.0)
            counted += tl.where(magnitude > limit * scale[:, None], 1, 0) + tl.where(finite, 0, 65536)
            largest = tl.maximum(largest, magnitude)
            largest_scale = tl.maximum(largest_scale, scale)
    if tl.program_id(0) == 0:
        tl.atomic_add(sums_ptr + 0, tl.full((), 1.0, tl.float64) * rows * cols, sem="relaxed")
    nonzero, underflowed, saturated, nonfinite, signal_sum, noise_sum, high, low = tl.reduce(
        (
            tl.ravel(compared & 255), tl.ravel(compared >> 8), tl.ravel(counted & 65535), tl.ravel(counted >> 16),
            tl.ravel(signal), tl.ravel(noise), tl.ravel(largest), tl.ravel(smallest),
        ),
        0, _joined,
    )  # fmt: skip
    _add(sums_ptr + 1, nonzero)
    _add(sums_ptr + 2, underflowed)
    _add(sums_ptr + 3, saturated)
    _add(sums_ptr + 4, nonfinite)
    _add(sums_ptr + 5, signal_sum)
    _add(sums_ptr + 6, noise_sum)
    # As bits of integers, non-negative FP32 numbers order alike.
    _raise(extremes_ptr + 0, high.to(tl.int32, bitcast=True))
    low = low.to(tl.int32, bitcast=True)
    tl.atomic_min(extremes_ptr + 1, low, mask=low < tl.load(extremes_ptr + 1), sem="relaxed")
    _raise(extremes_ptr + 2, tl.max(largest_scale).to(tl.int32, bitcast=True))


_launch = Launcher(_errors_kernel, num_warps=_WARPS)


def fits(block_rows: int, block_cols: int) -> bool:
    """Whether the kernel reads scales of blocks of this size; 0 columns are a whole row."""
    return block_cols in (0, _TN) and (block_rows in (0, 1) or block_rows % _TM == 0)


def add_errors(
    sums: Tensor, extremes: Tensor, values: Tensor, data: Tensor, scales: Tensor, block_rows: int, limit: float
) -> None:
    """Add the errors of a matrix to a row of sums.

    Args:
        sums: FP64 [7], a row of ``formats.errors.new_sums``.
        extremes: FP32 [3], as well.
        values: FP32 or half [rows, cols], any strides, before they were rounded.
        data: float8 or half [rows, cols], any strides; stored value = data * scale_inv.
        scales: [rows of blocks, blocks of a row], any strides: scale_inv in FP32, or exponents in uint8, of which
            2**(exponent - 127) is the scale_inv. A stride of 0 along a row is one scale for the whole row.
        block_rows: rows of a block; 0 for all of them.
        limit: see ``formats.errors.clipped_beyond``.
    """
    rows, cols = values.shape
    if not rows * cols:
        return
    across, tiles = triton.cdiv(cols, _TN), triton.cdiv(rows, _TM)
    depth = min(tiles, max(1, _PROGRAMS // across))
    # By the places of the tiles, also of those beyond the last column: the kernel counts up to 255 tiles of a program.
    step = max(1, tiles * across * _TM * _TN // _ALL)
    numbers = (rows, cols, *values.stride(), *data.stride(), *scales.stride(), depth, step)
    pointers = (values, data, scales, sums, extremes.view(torch.int32))
    key = (
        values.dtype, data.dtype, scales.dtype, block_rows, tuple([t.data_ptr() % 16 == 0 for t in pointers]),
        tuple([(n == 1, n % 16 == 0) for n in numbers]),
    )  # fmt: skip
    _launch(
        values.get_device(), key, across * depth, (*pointers, *numbers, limit),
        lambda: {"BLOCK_ROWS": block_rows, "EXPONENTS": scales.dtype == torch.uint8, "TM": _TM, "TN": _TN},
    )  # fmt: skip

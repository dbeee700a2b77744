"""Sums of the errors of rounding, added up on a GPU in one launch, without a host sync.

The sums are those of ``formats.errors.add_errors``, which adds in FP64; here a program adds up to some ten thousand
values in FP32 before it adds in FP64. Importing this file needs Triton.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from nemo_lowprec.kernels.launcher import Launcher

_TM, _TN = 8, 128  # of a tile, which lies in one block of scales along a row
_PROGRAMS = 2048  # about four for each scheduler of an H200; each goes over several tiles
_WARPS = 4


@triton.jit
def _errors_kernel(
    x_ptr, q_ptr, scale_ptr, sums_ptr, extremes_ptr, rows, cols, x_m, x_n, q_m, q_n, s_m, s_n, limit,
    BLOCK_ROWS: tl.constexpr, EXPONENTS: tl.constexpr, TM: tl.constexpr, TN: tl.constexpr,
):  # fmt: skip
    """Add the errors of the tiles of a program to the sums, and raise or lower the extremes.

    The scale of the value [m, n] is at [m // BLOCK_ROWS, n // TN] of the scales, or with 0 rows at [0, n // TN];
    ``s_n`` is 0 for scales of whole rows.
    """
    tiles_n = tl.cdiv(cols, TN)
    tiles = tl.cdiv(rows, TM) * tiles_n
    nonzero = tl.zeros([TM, TN], dtype=tl.int32)
    underflowed = tl.zeros([TM, TN], dtype=tl.int32)
    saturated = tl.zeros([TM, TN], dtype=tl.int32)
    nonfinite = tl.zeros([TM, TN], dtype=tl.int32)
    signal = tl.zeros([TM, TN], dtype=tl.float32)
    noise = tl.zeros([TM, TN], dtype=tl.float32)
    largest = tl.zeros([TM, TN], dtype=tl.float32)
    smallest = tl.full([TM, TN], float("inf"), dtype=tl.float32)
    largest_scale = tl.zeros([TM], dtype=tl.float32)
    count = tl.zeros([TM, TN], dtype=tl.int32)
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        m = (tile // tiles_n).to(tl.int64) * TM + tl.arange(0, TM)
        n = (tile % tiles_n).to(tl.int64) * TN + tl.arange(0, TN)
        inside = (m < rows)[:, None] & (n < cols)[None, :]
        x = tl.load(x_ptr + m[:, None] * x_m + n[None, :] * x_n, mask=inside, other=0.0).to(tl.float32)
        q = tl.load(q_ptr + m[:, None] * q_m + n[None, :] * q_n, mask=inside, other=0.0).to(tl.float32)
        block = m // BLOCK_ROWS if BLOCK_ROWS else m * 0
        scale = tl.load(scale_ptr + block * s_m + (tile % tiles_n) * s_n, mask=m < rows, other=0)
        if EXPONENTS:
            scale = (scale.to(tl.int32) << 23).to(tl.float32, bitcast=True)
        scale = scale.to(tl.float32)
        stored = q * scale[:, None]
        magnitude = tl.abs(x)
        finite = inside & (magnitude < float("inf")) & (tl.abs(stored) < float("inf"))  # false for NaN
        magnitude = tl.where(finite, magnitude, 0.0)
        is_nonzero = magnitude > 0
        error = tl.where(finite, x - stored, 0.0)
        count += inside.to(tl.int32)
        nonzero += is_nonzero.to(tl.int32)
        underflowed += (is_nonzero & (stored == 0)).to(tl.int32)
        saturated += (magnitude > limit * scale[:, None]).to(tl.int32)
        nonfinite += (inside & (finite == 0)).to(tl.int32)
        signal += magnitude * magnitude
        noise += error * error
        largest = tl.maximum(largest, magnitude)
        smallest = tl.minimum(smallest, tl.where(is_nonzero, magnitude, float("inf")))
        largest_scale = tl.maximum(largest_scale, scale)
    tl.atomic_add(sums_ptr + 0, tl.sum(count).to(tl.float64), sem="relaxed")
    tl.atomic_add(sums_ptr + 1, tl.sum(nonzero).to(tl.float64), sem="relaxed")
    tl.atomic_add(sums_ptr + 2, tl.sum(underflowed).to(tl.float64), sem="relaxed")
    tl.atomic_add(sums_ptr + 3, tl.sum(saturated).to(tl.float64), sem="relaxed")
    tl.atomic_add(sums_ptr + 4, tl.sum(nonfinite).to(tl.float64), sem="relaxed")
    tl.atomic_add(sums_ptr + 5, tl.sum(signal).to(tl.float64), sem="relaxed")
    tl.atomic_add(sums_ptr + 6, tl.sum(noise).to(tl.float64), sem="relaxed")
    # As bits of integers, non-negative FP32 numbers order alike.
    tl.atomic_max(extremes_ptr + 0, tl.max(largest).to(tl.int32, bitcast=True), sem="relaxed")
    tl.atomic_min(extremes_ptr + 1, tl.min(smallest).to(tl.int32, bitcast=True), sem="relaxed")
    tl.atomic_max(extremes_ptr + 2, tl.max(largest_scale).to(tl.int32, bitcast=True), sem="relaxed")


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
    numbers = (rows, cols, *values.stride(), *data.stride(), *scales.stride())
    pointers = (values, data, scales, sums, extremes.view(torch.int32))
    key = (
        values.dtype, data.dtype, scales.dtype, block_rows, tuple([t.data_ptr() % 16 == 0 for t in pointers]),
        tuple([(n == 1, n % 16 == 0) for n in numbers]),
    )  # fmt: skip
    programs = min(_PROGRAMS, triton.cdiv(rows, _TM) * triton.cdiv(cols, _TN))
    _launch(
        values.get_device(), key, programs, (*pointers, *numbers, limit),
        lambda: {"BLOCK_ROWS": block_rows, "EXPONENTS": scales.dtype == torch.uint8, "TM": _TM, "TN": _TN},
    )  # fmt: skip

"""Adds up partial sums on a GPU, always in the same order. Importing this file needs Triton.

Kernels that pass over a matrix leave a row of partial sums for each of their programs: gradients of biases and of the
parameters of norms. Torch's own reduction of so small a matrix takes nearly twice as long.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from nemo_lowprec.kernels.launcher import Launcher
from nemo_lowprec.kernels.triton_cast import TYPES

_ROWS, _COLS, _WARPS = 64, 32, 4


@triton.jit
def _sum_kernel(
    parts_ptr, first_ptr, second_ptr, parts, cols, FIRST: tl.constexpr, SECOND: tl.constexpr, VALUES: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """FIRST, SECOND, VALUES: dtypes that the sums are rounded to, VALUES before the other."""
    tiles = tl.cdiv(cols, BN)
    pid = tl.program_id(0)
    second = pid // tiles
    n = (pid % tiles) * BN + tl.arange(0, BN)
    inside = n < cols
    total = tl.zeros((BM, BN), tl.float32)
    for start in range(0, parts, BM):
        m = start + tl.arange(0, BM)
        offset = (second * parts + m)[:, None] * cols + n[None, :]
        total += tl.load(parts_ptr + offset, mask=(m < parts)[:, None] & inside[None, :], other=0.0)
    rounded = tl.sum(total, axis=0).to(VALUES)
    if second == 0:
        tl.store(first_ptr + n, rounded.to(FIRST).to(first_ptr.dtype.element_ty), mask=inside)
    else:
        tl.store(second_ptr + n, rounded.to(SECOND).to(second_ptr.dtype.element_ty), mask=inside)


_sum = Launcher(_sum_kernel, num_warps=_WARPS)
_FP32 = (torch.float32, torch.float32)


def add_up(
    parts: Tensor, results: Sequence[tuple[torch.dtype, torch.dtype]] = (_FP32,), values: torch.dtype = torch.float32
) -> list[Tensor]:
    """The sums of ``parts`` over the dimension before the last.

    Args:
        parts: FP32 [1 or 2, partial sums, cols], contiguous, on a GPU.
        results: for each of the first dimension, a dtype that the sums are rounded to and the dtype of the result.
        values: the dtype that they are rounded to before.

    Returns:
        Tensors [cols].
    """
    _, rows, cols = parts.shape
    found = [torch.empty(cols, dtype=dtype, device=parts.device) for _, dtype in results]
    first, second = found[0], found[-1]
    key = None
    if rows > 1 and cols % 16 == 0 and parts.data_ptr() % 16 == 0:
        key = cols, rows % 16 == 0, values, *results
    _sum(
        parts.get_device(), key, len(found) * -(-cols // _COLS), (parts, first, second, rows, cols),
        lambda: {
            "FIRST": TYPES[results[0][0]], "SECOND": TYPES[results[-1][0]], "VALUES": TYPES[values], "BM": _ROWS,
            "BN": _COLS,
        },
    )  # fmt: skip
    return found

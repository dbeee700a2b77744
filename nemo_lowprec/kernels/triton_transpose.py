"""Transposes matrices of 8-bit numbers on a GPU. Importing this file needs Triton.

torch copies an 8-bit transpose byte by byte; here a tile is moved in the registers, and both sides are whole lines.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from nemo_lowprec.kernels.launcher import Launcher
from nemo_lowprec.kernels.memory import new

_TILE = {"BM": 128, "BN": 128}  # lines of 128 bytes on both sides


@triton.jit
def _transpose_kernel(x_ptr, out_ptr, rows, cols, BM: tl.constexpr, BN: tl.constexpr):
    tiles_n = tl.cdiv(cols, BN)
    pid = tl.program_id(0).to(tl.int64)
    m = (pid // tiles_n) * BM + tl.arange(0, BM)
    n = (pid % tiles_n) * BN + tl.arange(0, BN)
    x = tl.load(x_ptr + m[:, None] * cols + n[None, :], mask=(m < rows)[:, None] & (n < cols)[None, :], other=0)
    tl.store(out_ptr + n[:, None] * rows + m[None, :], tl.trans(x), mask=(n < cols)[:, None] & (m < rows)[None, :])


_transpose = Launcher(_transpose_kernel, num_warps=4)


def transpose(values: Tensor) -> Tensor:
    """The transpose [cols, rows], contiguous, of 8-bit ``values`` [rows, cols], contiguous, on a GPU."""
    rows, cols = values.shape
    device = values.get_device()
    out: Tensor = new(device, (cols, rows), values.dtype)
    if rows and cols:
        source, target = values.view(torch.uint8), out.view(torch.uint8)
        key = "plain" if not (rows % 16 or cols % 16 or values.data_ptr() % 16) else None
        programs = -(-rows // _TILE["BM"]) * -(-cols // _TILE["BN"])
        _transpose(device, key, programs, (source, target, rows, cols), lambda: _TILE)
    return out

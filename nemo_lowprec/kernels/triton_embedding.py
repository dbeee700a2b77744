"""The gradient of an embedding's table on a GPU, in the dtype that is wanted, without atomics.

torch's own kernels write the table's gradient in the dtype of the looked-up rows; a cast of the whole table follows.
Importing this file needs Triton.

The tokens are sorted. A program adds up the rows of ``_CHUNK`` of them. A token whose run crosses the end of a chunk
has a partial sum in each; a second launch adds these up in their order, so that equal inputs give equal bits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from nemo_lowprec.kernels.launcher import Launcher

_CHUNK, _COLS, _WARPS = 8, 1024, 4


@triton.jit
def _sum_kernel(
    grad_ptr, order_ptr, token_ptr, out_ptr, part_ptr, count, cols, padding, CHUNK: tl.constexpr, BN: tl.constexpr
):
    """Sums of the runs in a chunk. ``part``: FP32 [chunks, 2, cols], the run that began before, and that goes on."""
    tiles = tl.cdiv(cols, BN)
    pid = tl.program_id(0)
    chunk, first = pid // tiles, pid // tiles * CHUNK
    n = (pid % tiles) * BN + tl.arange(0, BN)
    part = part_ptr + chunk.to(tl.int64) * 2 * cols + n
    total = tl.zeros((BN,), tl.float32)
    began_before = tl.load(token_ptr + first - 1, mask=first > 0, other=-1) == tl.load(token_ptr + first)
    for i in tl.static_range(CHUNK):
        at = first + i
        there = at < count
        token = tl.load(token_ptr + at, mask=there, other=-1)
        row = tl.load(order_ptr + at, mask=there, other=0)
        total += tl.load(grad_ptr + row * cols + n, mask=there & (n < cols), other=0.0).to(tl.float32)
        is_last = tl.load(token_ptr + at + 1, mask=at + 1 < count, other=-1) != token
        ends = there & (is_last | (i == CHUNK - 1))
        inside = ends & (n < cols)
        whole = is_last & (began_before == 0)
        tl.store(part, total, mask=inside & began_before)
        tl.store(part + cols, total, mask=inside & (is_last == 0) & (began_before == 0))
        tl.store(
            out_ptr + token * cols + n, total.to(out_ptr.dtype.element_ty), mask=inside & whole & (token != padding)
        )
        total = tl.where(ends, 0.0, total)
        began_before = began_before & (ends == 0)


@triton.jit
def _join_kernel(token_ptr, end_ptr, out_ptr, part_ptr, count, cols, padding, CHUNK: tl.constexpr, BN: tl.constexpr):
    """The sum of the run that begins in a chunk and goes on behind it. ``end``: of each token's run."""
    tiles = tl.cdiv(cols, BN)
    pid = tl.program_id(0)
    chunk, first = pid // tiles, pid // tiles * CHUNK
    n = (pid % tiles) * BN + tl.arange(0, BN)
    after = first + CHUNK
    token = tl.load(token_ptr + after - 1, mask=after < count, other=-1)
    end = tl.load(end_ptr + after - 1, mask=after < count, other=0).to(tl.int32)
    began_before = tl.load(token_ptr + first - 1, mask=first > 0, other=-1) == token
    inside = (end > after) & (began_before == 0) & (token != padding) & (n < cols)
    part = part_ptr + chunk.to(tl.int64) * 2 * cols + n
    total = tl.load(part + cols, mask=inside, other=0.0)
    for _ in range(tl.cdiv(tl.maximum(end - after, 0), CHUNK)):
        part += 2 * cols
        total += tl.load(part, mask=inside, other=0.0)
    tl.store(out_ptr + token * cols + n, total.to(out_ptr.dtype.element_ty), mask=inside)


_sum = Launcher(_sum_kernel, num_warps=_WARPS)
_join = Launcher(_join_kernel, num_warps=_WARPS)


def table_gradient(
    grad: Tensor, tokens: Tensor, rows: int, padding: int | None, dtype: torch.dtype, out: Tensor | None = None
) -> Tensor:
    """The sums of the rows of ``grad`` by token, in FP32 and rounded once.

    Args:
        grad: [count, features] of any float dtype, on a GPU, contiguous.
        tokens: int64 or int32 [count].
        rows: of the table.
        padding: the token whose row has no gradient.
        dtype: of the result.
        out: memory for the result, contiguous.

    Returns:
        [rows, features].
    """
    count, cols = grad.shape
    found = torch.empty(rows, cols, dtype=dtype, device=grad.device) if out is None else out
    found.zero_()
    if not grad.numel():
        return found
    tokens, order = torch.sort(tokens.reshape(-1).long(), stable=True)
    chunks = -(-count // _CHUNK)
    part = torch.empty(chunks, 2, cols, dtype=torch.float32, device=grad.device)
    programs, device = chunks * -(-cols // _COLS), grad.get_device()
    absent, constants = -1 if padding is None else padding, {"CHUNK": _CHUNK, "BN": _COLS}
    _sum(device, None, programs, (grad, order, tokens, found, part, count, cols, absent), lambda: constants)
    end = torch.searchsorted(tokens, tokens, right=True)
    _join(device, None, programs, (tokens, end, found, part, count, cols, absent), lambda: constants)
    return found

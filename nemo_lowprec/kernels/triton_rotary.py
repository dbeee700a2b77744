"""Rotary position embedding of queries and keys in one launch.

The first of a pair of elements becomes x0 * cos0 - x1 * sin0, the second x1 * cos1 + x0 * sin1. Products, sums and
their roundings are those of torch's elementwise operations, bit for bit. Importing this file needs Triton.
"""

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from nemo_lowprec.kernels.launcher import Launcher

_BLOCK_ROWS, _WARPS = 32, 4
_INT32 = 2**31


@triton.jit
def _rotate_rows(
    x_ptr,
    out_ptr,
    cos_ptr,
    sin_ptr,
    block,
    rows,
    seq,
    stride_b,
    stride_s,
    stride_h,
    cos_b,
    cos_s,
    sin_b,
    sin_s,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    ROTARY: tl.constexpr,
    X_STEP: tl.constexpr,
    X_OTHER: tl.constexpr,
    OUT_STEP: tl.constexpr,
    OUT_OTHER: tl.constexpr,
    COS_STEP: tl.constexpr,
    COS_OTHER: tl.constexpr,
    ROUNDS: tl.constexpr,
    BACKWARD: tl.constexpr,
    PAIRS: tl.constexpr,
    REST: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
):
    """Rotate ``BLOCK_ROWS`` heads of consecutive tokens; element i of a pair list is i * STEP, its partner + OTHER."""
    row = block * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    token = row // HEADS
    batch = (token // seq).to(tl.int64)
    place = (token % seq).to(tl.int64)
    here = (row < rows)[:, None]
    x = (x_ptr + batch * stride_b + place * stride_s + (row % HEADS).to(tl.int64) * stride_h)[:, None]
    out = (out_ptr + row.to(tl.int64) * DIM)[:, None]
    cos = (cos_ptr + batch * cos_b + place * cos_s)[:, None]
    sin = (sin_ptr + batch * sin_b + place * sin_s)[:, None]

    i = tl.arange(0, PAIRS)[None, :]
    inside = here & (i < ROTARY // 2)
    x0 = tl.load(x + i * X_STEP, mask=inside, other=0.0).to(tl.float32)
    x1 = tl.load(x + (i * X_STEP + X_OTHER), mask=inside, other=0.0).to(tl.float32)
    cos0 = tl.load(cos + i * COS_STEP, mask=inside, other=0.0).to(tl.float32)
    sin0 = tl.load(sin + i * COS_STEP, mask=inside, other=0.0).to(tl.float32)
    if COS_OTHER == 0:
        cos1, sin1 = cos0, sin0
    else:
        cos1 = tl.load(cos + (i * COS_STEP + COS_OTHER), mask=inside, other=0.0).to(tl.float32)
        sin1 = tl.load(sin + (i * COS_STEP + COS_OTHER), mask=inside, other=0.0).to(tl.float32)
    own0, own1 = x0 * cos0, x1 * cos1
    if BACKWARD:  # the transposed rotation
        other0, other1 = x1 * sin1, -(x0 * sin0)
    else:
        other0, other1 = -(x1 * sin0), x0 * sin1
    half = out_ptr.dtype.element_ty
    if ROUNDS:
        own0, own1 = own0.to(half).to(tl.float32), own1.to(half).to(tl.float32)
        other0, other1 = other0.to(half).to(tl.float32), other1.to(half).to(tl.float32)
    tl.store(out + i * OUT_STEP, (own0 + other0).to(half), mask=inside)
    tl.store(out + (i * OUT_STEP + OUT_OTHER), (own1 + other1).to(half), mask=inside)
    if REST > 0:
        j = tl.arange(0, REST)[None, :]
        beyond = here & (j < DIM - ROTARY)
        tl.store(out + (j + ROTARY), tl.load(x + (j + ROTARY), mask=beyond, other=0.0).to(half), mask=beyond)


@triton.jit(do_not_specialize=["q_blocks", "q_rows", "k_rows", "seq"])
def _rotary_kernel(
    q_ptr,
    k_ptr,
    q_out_ptr,
    k_out_ptr,
    cos_ptr,
    sin_ptr,
    q_blocks,
    q_rows,
    k_rows,
    seq,
    q_b,
    q_s,
    q_h,
    k_b,
    k_s,
    k_h,
    cos_b,
    cos_s,
    sin_b,
    sin_s,
    Q_HEADS: tl.constexpr,
    K_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    ROTARY: tl.constexpr,
    X_STEP: tl.constexpr,
    X_OTHER: tl.constexpr,
    OUT_STEP: tl.constexpr,
    OUT_OTHER: tl.constexpr,
    COS_STEP: tl.constexpr,
    COS_OTHER: tl.constexpr,
    ROUNDS: tl.constexpr,
    BACKWARD: tl.constexpr,
    PAIRS: tl.constexpr,
    REST: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
):
    block = tl.program_id(0)
    if block < q_blocks:
        _rotate_rows(
            q_ptr, q_out_ptr, cos_ptr, sin_ptr, block, q_rows, seq, q_b, q_s, q_h, cos_b, cos_s, sin_b, sin_s,
            Q_HEADS, DIM, ROTARY, X_STEP, X_OTHER, OUT_STEP, OUT_OTHER, COS_STEP, COS_OTHER, ROUNDS, BACKWARD,
            PAIRS, REST, BLOCK_ROWS,
        )  # fmt: skip
    else:
        _rotate_rows(
            k_ptr, k_out_ptr, cos_ptr, sin_ptr, block - q_blocks, k_rows, seq, k_b, k_s, k_h, cos_b, cos_s, sin_b,
            sin_s, K_HEADS, DIM, ROTARY, X_STEP, X_OTHER, OUT_STEP, OUT_OTHER, COS_STEP, COS_OTHER, ROUNDS, BACKWARD,
            PAIRS, REST, BLOCK_ROWS,
        )  # fmt: skip


# A product that is not rounded must not become part of a fused multiply-add, which torch's operations are not.
_rotary = Launcher(_rotary_kernel, num_warps=_WARPS, enable_fp_fusion=False)


def _places(layout: str, rotary: int) -> tuple[int, int]:
    """(distance between the first elements of two pairs, distance between the elements of a pair)."""
    return {"halves": (1, rotary // 2), "pairs": (2, 1), "first": (1, 0)}[layout]


def arguments(
    tensors: Sequence[Tensor], outs: Sequence[Tensor], cos: Tensor, sin: Tensor,
    layouts: tuple[str, str, str], rounds: bool, backward: bool, block_rows: int = _BLOCK_ROWS,
) -> tuple[int, tuple[object, ...], dict[str, object]]:  # fmt: skip
    """(programs, arguments, constants) of the kernel for ``rotate``."""
    q, k = tensors[0], tensors[-1]
    seq, dim, rotary = q.shape[1], q.shape[3], cos.shape[-1]
    q_rows, k_rows = (t.shape[0] * t.shape[1] * t.shape[2] for t in (q, k))
    q_blocks = -(-q_rows // block_rows)
    blocks = q_blocks + (-(-k_rows // block_rows) if len(tensors) > 1 else 0)
    cos_b, sin_b = (t.stride(0) if t.shape[0] > 1 else 0 for t in (cos, sin))
    args = (
        q, k, outs[0], outs[-1], cos, sin, q_blocks, q_rows, k_rows, seq, *q.stride()[:3], *k.stride()[:3],
        cos_b, cos.stride(1), sin_b, sin.stride(1),
    )  # fmt: skip
    (x_step, x_other), (out_step, out_other), (cos_step, cos_other) = (_places(name, rotary) for name in layouts)
    constants = {
        "Q_HEADS": q.shape[2], "K_HEADS": k.shape[2], "DIM": dim, "ROTARY": rotary, "X_STEP": x_step,
        "X_OTHER": x_other, "OUT_STEP": out_step, "OUT_OTHER": out_other, "COS_STEP": cos_step,
        "COS_OTHER": cos_other, "ROUNDS": rounds, "BACKWARD": backward,
        "PAIRS": triton.next_power_of_2(rotary // 2),
        "REST": triton.next_power_of_2(dim - rotary) if dim > rotary else 0, "BLOCK_ROWS": block_rows,
    }  # fmt: skip
    return blocks, args, constants


def rotate(
    tensors: Sequence[Tensor],
    outs: Sequence[Tensor],
    cos: Tensor,
    sin: Tensor,
    layouts: tuple[str, str, str],
    rounds: bool,
    backward: bool,
) -> None:
    """Rotate one or two tensors.

    Args:
        tensors: [batch, seq, heads, dim] each, CUDA, FP32 or half, any strides with 1 as the last; the numbers of
            heads may differ.
        outs: contiguous tensors of the same shapes and of one dtype, which are filled.
        cos, sin: [batch or 1, seq, rotary dim], last stride 1. Elements beyond the rotary dim are copied.
        layouts: where the pairs are in ``tensors``, in ``outs`` ("halves" or "pairs") and in ``cos`` and ``sin``
            (also "first": the first half has the factors of both elements).
        rounds: whether products are rounded to the dtype of ``outs``.
        backward: whether to rotate back.
    """
    if not tensors[0].numel():
        return
    blocks, args, constants = arguments(tensors, outs, cos, sin, layouts, rounds, backward)
    q, k, q_out = tensors[0], tensors[-1], outs[0]
    key = None
    strides = args[10:]
    # All addresses and strides are multiples of 16, so that Triton compiles alike.
    even = all(t.data_ptr() % 16 == 0 for t in (q, k, q_out, outs[-1], cos, sin))
    if even and all(s % 16 == 0 and s < _INT32 for s in strides):  # type: ignore[operator]
        key = (
            q.dtype, q_out.dtype, cos.dtype, q.shape[2], k.shape[2], q.shape[3], cos.shape[-1], layouts, rounds,
            backward,
        )  # fmt: skip
    _rotary(q.get_device(), key, blocks, args, lambda: constants)

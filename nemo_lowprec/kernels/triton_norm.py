"""LayerNorm and RMSNorm over the last dimension on a GPU, one pass each way, from FP32 or half to half precision.

Backward writes the input's gradient and adds up the parameters' without atomics, so that equal inputs give equal bits.
Statistics are FP32. A program holds whole rows in registers. Importing this file needs Triton.

The result is quantized by the layer that reads it: a kernel that does both has to hold blocks of many rows for the
transposed FP8 form, and is no faster on an H200 than the two, of which the second reads the result from the L2 cache
(12608 x 1024, FP32: 40 µs, and 20 + 16).
"""

from __future__ import annotations

from functools import cache, lru_cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor, nn

from nemo_lowprec.compat.tensors import PlainSubclass
from nemo_lowprec.kernels.launcher import Launcher
from nemo_lowprec.kernels.triton_sums import add_up

_PLAIN = (Tensor, nn.Parameter)
_FLOATS = (torch.float32, torch.float16, torch.bfloat16)
_MIN_FEATURES, _MAX_FEATURES = 16, 16384


class Blocks(NamedTuple):
    """How a pass is cut into programs.

    Attributes:
        rows: that a program holds at a time, a power of two.
        warps: of a program.
        programs: of backward, for each multiprocessor.
    """

    rows: int
    warps: int
    programs: int = 0


def forward_blocks(features: int) -> Blocks:
    """The blocks of the forward pass."""
    width = triton.next_power_of_2(features)
    return Blocks(max(1, min(32, 4096 // width)), 4 if width <= 4096 else 8 if width <= 8192 else 16)


def backward_blocks(features: int, itemsize: int) -> Blocks:
    """The blocks of the backward pass of values of ``itemsize`` bytes."""
    width = triton.next_power_of_2(features)
    rows = max(1, min(4, 8192 // width))
    return Blocks(rows, 4 if width <= 4096 else 8 if width <= 8192 else 16, 2 if width * itemsize >= 4096 else 4)


@triton.jit
def _inside(i, end, MASK: tl.constexpr):
    """Whether the indices are below ``end``; known without MASK, which saves registers and whole instructions."""
    if MASK:
        inside = i < end
    else:
        inside = tl.full(i.shape, True, tl.int1)
    return inside


@triton.jit
def _factor(weight_ptr, n, inside, WEIGHT: tl.constexpr, ZERO_CENTERED: tl.constexpr, DTYPE: tl.constexpr):
    """The factors of columns ``n``, rounded to the input's dtype."""
    factor = tl.full(n.shape, 1.0, tl.float32)
    if WEIGHT:
        factor = tl.load(weight_ptr + n, mask=inside, other=0.0).to(DTYPE).to(tl.float32)
        if ZERO_CENTERED:
            factor += 1.0
    return factor


@triton.jit
def _forward_kernel(
    x_ptr, branch_ptr, total_ptr, weight_ptr, bias_ptr, y_ptr, stats_ptr, rows, cols, eps,
    LAYER: tl.constexpr, ADD: tl.constexpr, WEIGHT: tl.constexpr, BIAS: tl.constexpr, ZERO_CENTERED: tl.constexpr,
    SAVE: tl.constexpr, MASK_M: tl.constexpr, MASK_N: tl.constexpr, R: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Normalize R rows, with ADD of x + branch, which is rounded and written to ``total``.

    ``stats``: FP32 [2, rows], means and 1 / standard deviations; [1, rows] of an RMSNorm.
    """
    DTYPE: tl.constexpr = total_ptr.dtype.element_ty
    m = tl.program_id(0) * R + tl.arange(0, R)
    n = tl.arange(0, BN)
    inside_m, inside_n = _inside(m, rows, MASK_M), _inside(n, cols, MASK_N)
    inside = inside_m[:, None] & inside_n[None, :]
    offset = m[:, None] * cols + n[None, :]
    x = tl.load(x_ptr + offset, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        total = (x + tl.load(branch_ptr + offset, mask=inside, other=0.0).to(tl.float32)).to(DTYPE)
        tl.store(total_ptr + offset, total, mask=inside)
        x = total.to(tl.float32)
    if LAYER:
        mean = tl.sum(x, axis=1) / cols
        x = tl.where(inside, x - mean[:, None], 0.0)
    rstd = tl.rsqrt(tl.sum(x * x, axis=1) / cols + eps)
    if SAVE:
        if LAYER:
            tl.store(stats_ptr + m, mean, mask=inside_m)
            tl.store(stats_ptr + rows + m, rstd, mask=inside_m)
        else:
            tl.store(stats_ptr + m, rstd, mask=inside_m)
    y = x * rstd[:, None] * _factor(weight_ptr, n, inside_n, WEIGHT, ZERO_CENTERED, DTYPE)[None, :]
    if BIAS:
        y += tl.load(bias_ptr + n, mask=inside_n, other=0.0).to(DTYPE).to(tl.float32)[None, :]
    tl.store(y_ptr + offset, y.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize_on_alignment=["weight_ptr", "stats_ptr"])
def _backward_kernel(
    grad_ptr, x_ptr, weight_ptr, stats_ptr, total_ptr, dx_ptr, half_ptr, sums_ptr, rows, cols,
    LAYER: tl.constexpr, WEIGHT: tl.constexpr, ZERO_CENTERED: tl.constexpr, DX: tl.constexpr, DWEIGHT: tl.constexpr,
    DBIAS: tl.constexpr, TOTAL: tl.constexpr, HALF: tl.constexpr, MASK_M: tl.constexpr, MASK_N: tl.constexpr,
    R: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """R rows at a time, and every ``programs``-th block of rows. ``sums``: FP32 [1 or 2, programs, cols]."""
    pid, programs = tl.program_id(0), tl.num_programs(0)
    n = tl.arange(0, BN)
    inside_n = _inside(n, cols, MASK_N)
    factor = _factor(weight_ptr, n, inside_n, WEIGHT, ZERO_CENTERED, x_ptr.dtype.element_ty)[None, :]
    dweight = tl.zeros((R, BN), tl.float32)
    dbias = tl.zeros((R, BN), tl.float32)
    for first in range(pid * R, rows, programs * R):
        m = first + tl.arange(0, R)
        inside_m = _inside(m, rows, MASK_M)
        inside = inside_m[:, None] & inside_n[None, :]
        offset = m[:, None] * cols + n[None, :]
        grad = tl.load(grad_ptr + offset, mask=inside, other=0.0).to(tl.float32)
        x = tl.load(x_ptr + offset, mask=inside, other=0.0).to(tl.float32)
        if LAYER:
            x -= tl.load(stats_ptr + m, mask=inside_m, other=0.0)[:, None]
            rstd = tl.load(stats_ptr + rows + m, mask=inside_m, other=0.0)[:, None]
        else:
            rstd = tl.load(stats_ptr + m, mask=inside_m, other=0.0)[:, None]
        x *= rstd
        if DWEIGHT:
            dweight += tl.where(inside, grad * x, 0.0)
        if DBIAS:
            dbias += grad
        if DX:
            grad *= factor
            along = tl.sum(tl.where(inside, grad * x, 0.0), axis=1) / cols
            dx = grad - x * along[:, None]
            if LAYER:
                dx -= (tl.sum(grad, axis=1) / cols)[:, None]
            dx = (dx * rstd).to(dx_ptr.dtype.element_ty)
            if TOTAL:  # a half gradient is rounded before, as by torch's own operations
                total = tl.load(total_ptr + offset, mask=inside, other=0.0).to(tl.float32)
                dx = (dx.to(tl.float32) + total).to(dx_ptr.dtype.element_ty)
            tl.store(dx_ptr + offset, dx, mask=inside)
            if HALF:
                tl.store(half_ptr + offset, dx.to(half_ptr.dtype.element_ty), mask=inside)
    mine = sums_ptr + pid * cols + n
    if DWEIGHT:
        tl.store(mine, tl.sum(dweight, axis=0), mask=inside_n)
        if DBIAS:
            tl.store(mine + programs * cols, tl.sum(dbias, axis=0), mask=inside_n)
    elif DBIAS:
        tl.store(mine, tl.sum(dbias, axis=0), mask=inside_n)


@cache
def _launcher(kernel: str, warps: int) -> Launcher:
    return Launcher(globals()[kernel], num_warps=warps)


def fits(x: Tensor, weight: Tensor | None, bias: Tensor | None, out: torch.dtype) -> bool:
    """Whether the kernels compute the norm of ``x`` [..., features] with a result in ``out``.

    FP32 values are normalized to half precision, and half values to their own dtype.
    """
    features = x.shape[-1] if x.dim() else 0
    if not _MIN_FEATURES <= features <= _MAX_FEATURES or not x.numel() or out not in (torch.float16, torch.bfloat16):
        return False
    if x.dtype not in (out, torch.float32) or x.numel() >= 2**31:  # offsets have 32 bits
        return False
    if type(x) not in _PLAIN and not isinstance(x, PlainSubclass):
        return False
    device = x.get_device()
    for param in (weight, bias):
        if param is not None and not (
            type(param) in _PLAIN and param.dtype in _FLOATS and param.shape == x.shape[-1:]
            and param.get_device() == device and param.is_contiguous()
        ):  # fmt: skip
            return False
    return True


def fits_sum(x: Tensor, branch: Tensor, weight: Tensor | None, bias: Tensor | None, out: torch.dtype) -> bool:
    """Whether ``add_forward`` takes these; the sum has the wider dtype of both terms."""
    same = branch.shape == x.shape and branch.get_device() == x.get_device() and branch.dtype in (out, torch.float32)
    return same and branch.is_contiguous() and x.is_contiguous() and fits(x, weight, bias, out)


def forward(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    layer: bool,
    zero_centered: bool,
    out: torch.dtype,
    save: bool,
    blocks: Blocks | None = None,
) -> tuple[Tensor, Tensor | None]:
    """The norm of ``x`` over its last dimension.

    Args:
        x: [..., features], contiguous, on a GPU; see ``fits``.
        weight, bias: [features] or None, of any float dtype; rounded to the dtype of ``x``.
        layer: whether this is LayerNorm; else RMSNorm.
        zero_centered: whether the factor is 1 + ``weight``.
        out: dtype of the result.
        save: whether backward will need the statistics.
        blocks: None for ``forward_blocks``.

    Returns:
        The result, of the shape of ``x``, and the statistics: FP32 [2, rows], or for RMSNorm [1, rows].
    """
    return _forward(x, None, x, weight, bias, eps, layer, zero_centered, out, save, blocks)


def add_forward(
    x: Tensor, branch: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, layer: bool,
    zero_centered: bool, out: torch.dtype, blocks: Blocks | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:  # fmt: skip
    """``x + branch``, as torch computes it, and ``forward`` of the sum, with statistics; see ``fits_sum``.

    Returns:
        The sum, and the results of ``forward``.
    """
    total = torch.empty_like(x, dtype=torch.promote_types(x.dtype, branch.dtype))
    return total, *_forward(x, branch, total, weight, bias, eps, layer, zero_centered, out, True, blocks)


def _forward(
    x: Tensor, branch: Tensor | None, total: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float,
    layer: bool, zero_centered: bool, out: torch.dtype, save: bool, blocks: Blocks | None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    cols = x.shape[-1]
    rows = x.numel() // cols
    y = torch.empty_like(x, dtype=out)
    stats = torch.empty((1 + layer, rows), dtype=torch.float32, device=x.device) if save else None
    blocks = blocks or forward_blocks(cols)
    key = None
    if rows > 1 and not cols % 16 and not x.data_ptr() % 16 and (branch is None or not branch.data_ptr() % 16):
        key = (
            cols, rows % 16 == 0, rows % blocks.rows == 0, x.dtype, None if branch is None else branch.dtype, out,
            _alike(weight), _alike(bias), layer, zero_centered, save, blocks,
        )  # fmt: skip
    _launcher("_forward_kernel", blocks.warps)(
        x.get_device(), key, -(-rows // blocks.rows),
        (x, _or(branch, x), total, _or(weight, x), _or(bias, x), y, _or(stats, x), rows, cols, eps),
        lambda: {
            "LAYER": layer, "ADD": branch is not None, "WEIGHT": weight is not None, "BIAS": bias is not None,
            "ZERO_CENTERED": zero_centered, "SAVE": save, **_cut(rows, cols, blocks),
        },
    )  # fmt: skip
    return y, stats


def _cut(rows: int, cols: int, blocks: Blocks) -> dict[str, Any]:
    width = triton.next_power_of_2(cols)
    return {"MASK_M": rows % blocks.rows > 0, "MASK_N": cols < width, "R": blocks.rows, "BN": width}


def backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    stats: Tensor,
    layer: bool,
    zero_centered: bool,
    needs: tuple[bool, bool, bool],
    dtypes: tuple[torch.dtype | None, torch.dtype | None],
    blocks: Blocks | None = None,
    total: Tensor | None = None,
    half: Tensor | None = None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """The gradients of (``x``, ``weight``, ``bias``); None for one that is not needed.

    Args:
        grad: of the result, of the shape of ``x``; half or FP32, contiguous.
        x, weight, bias, layer, zero_centered: as ``forward`` has had them.
        stats: as ``forward`` has returned them.
        needs: which gradients are needed.
        dtypes: of the gradients of weight and bias, which are rounded to the dtypes of ``x`` and of the parameter
            first, as by torch's own operations.
        blocks: None for ``backward_blocks``.
        total: is added to the gradient of ``x``; of its shape and dtype, contiguous.
        half: memory for the gradient of ``x``, with ``total``, in another dtype; contiguous.
    """
    cols = x.shape[-1]
    rows = x.numel() // cols
    device = x.get_device()
    need_dx, need_dw, need_db = needs
    blocks = blocks or backward_blocks(cols, x.element_size())
    programs = min(-(-rows // blocks.rows), _processors(device) * blocks.programs)
    dx = torch.empty_like(x) if need_dx else None
    sums = None
    if need_dw or need_db:
        sums = torch.empty((need_dw + need_db, programs, cols), dtype=torch.float32, device=x.device)
    even = not cols % 16 and not x.data_ptr() % 16
    key = None
    if rows > 1 and even and not grad.data_ptr() % 16:
        kind = weight is None or weight.dtype
        divisible = rows % 16 == 0, rows % blocks.rows == 0
        more = None if total is None else total.data_ptr() % 16 == 0, None if half is None else half.dtype
        key = cols, divisible, x.dtype, grad.dtype, kind, layer, zero_centered, needs, blocks, more
    _launcher("_backward_kernel", blocks.warps)(
        device, key, programs,
        (grad, x, _or(weight, x), stats, _or(total, x), _or(dx, x), _or(half, x), _or(sums, stats), rows, cols),
        lambda: {
            "LAYER": layer, "WEIGHT": weight is not None, "ZERO_CENTERED": zero_centered, "DX": need_dx,
            "DWEIGHT": need_dw, "DBIAS": need_db, "TOTAL": total is not None, "HALF": half is not None,
            **_cut(rows, cols, blocks),
        },
    )  # fmt: skip
    if sums is None:
        return dx, None, None
    needed = [
        (param.dtype, dtype)
        for param, dtype, need in ((weight, dtypes[0], need_dw), (bias, dtypes[1], need_db))
        if need and param is not None and dtype is not None
    ]
    found = add_up(sums, needed, x.dtype)
    return dx, found[0] if need_dw else None, found[-1] if need_db else None


def _or(tensor: Tensor | None, other: Tensor) -> Any:
    """What stands in the place of an argument that the kernel does not read."""
    return other if tensor is None else tensor


def _alike(param: Tensor | None) -> Any:
    """What Triton compiles for. A parameter may lie anywhere in a buffer; an even address is read four at a time."""
    return param is None or (param.dtype, param.data_ptr() % 16 == 0)


@lru_cache(maxsize=16)
def _processors(device: int) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count

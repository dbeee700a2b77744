"""Activations and gated activations on a GPU that write their result, and its gradients, in half and in FP8 at once.

One pass reads half tensors [rows, features] and writes, of each result: the half values, the rowwise and the columnwise
FP8 data, the amax and 1 / scale. The backward kernel also sums the columns of each gradient, for the bias in front.
Importing this file needs Triton.

Numerics are those of torch's operations one by one: the activation is computed in FP32 from half values and rounded to
half, a product of two half values is rounded to half, and FP8 data are quantized from the half values. An activation is
computed with one or two of the GPU's own functions (2**x, 1 / sqrt(x)) and without a branch, since the formulas of
CUDA's library take longer than the memory:

GELU    1 - erf(|x| / sqrt(2)) = 2**(a polynomial in |x|), of degree 8 for BF16 and 10 for FP16
others  a logistic function, 1 / (1 + 2**-x), as the square of 1 / sqrt; a tanh is one, too

With exact functions, of all 65,536 half values at most one result in BF16 and six in FP16 differ from torch's formula
by a step; those of the GPU are wrong by 2**-22, which moves another few. The error of a derivative is below 2**-17, and
a gradient differs from torch's by a step in fewer than one place of a hundred. Far out, where 1 + erf and 1 + tanh lose
their digits in torch, the results here lose the same ones. A result below 2**-120 may be zero.

A store of 8-bit data takes 16 elements of a thread where it may, and one of half data 8: with two layouts, Triton
would compute the activation twice, so that 8-bit data are stored 8 at a time (``_ROW_RUN``).
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from nemo_lowprec.formats.floats import FloatFormat
from nemo_lowprec.kernels.launcher import Launcher
from nemo_lowprec.kernels.memory import new
from nemo_lowprec.kernels.triton_cast import raise_amax, saturate

# In the kernels' numbers.
KINDS = ("gelu", "gelu_tanh", "silu", "relu", "quick_gelu")


class Tile(NamedTuple):
    """What one program computes, and how.

    Attributes:
        rows, cols: elements, powers of two.
        warps: of a program.
        reads_twice: whether a gated activation's backward reads its inputs again for the second gradient, from the
            cache; so half as many registers are in use at a time.
        packed: whether instructions of the GPU round two values to half at once and saturate FP8 data, in the place of
            Triton's. Triton's interpreter has none.
    """

    rows: int
    cols: int
    warps: int
    reads_twice: bool = True
    packed: bool = True


# Measured on an H200, the tiles of backward without sums on an H100.
FORWARD_TILE, BACKWARD_TILE = Tile(64, 128, 8), Tile(128, 64, 8)
GATED_BACKWARD_TILE, GATED_BACKWARD_TILE_WITH_SUMS = Tile(64, 32, 4), Tile(64, 64, 8, False)
_ROW_RUN = tl.constexpr(8)


class Target(NamedTuple):
    """How a result is quantized.

    Attributes:
        scale: FP32 [1].
        record: FP32 [1], raised to the result's amax where the amax is larger; None for no record.
        sums: whether the sums of the columns are wanted.
    """

    scale: Tensor
    fmt: FloatFormat
    rowwise: bool
    columnwise: bool
    record: Tensor | None
    sums: bool = False


class Made(NamedTuple):
    """A result: half [rows, features], FP8 of this shape, FP8 [features, rows], FP32 [1], FP32 [features].

    None stands for what was not wanted.
    """

    half: Tensor | None
    row: Tensor | None = None
    col: Tensor | None = None
    scale_inv: Tensor | None = None
    sums: Tensor | None = None


@triton.jit
def _logistic(x):
    """1 / (1 + e**-x)."""
    root = tl.rsqrt(1.0 + tl.exp2(x * -1.4426950408889634))
    return root * root


@triton.jit
def _normal_cdf(x, WIDE: tl.constexpr):
    """(1 + erf(x / sqrt(2))) / 2. ``WIDE``: for results that are rounded to FP16.

    The polynomials minimize the error of 1 - erf, and of its logarithm where 1 - erf is small, up to |x| = 5.7. From
    there on they fall, and erf is 1.
    """
    t = tl.abs(x)
    if WIDE:
        p = t * -4.1887805224405383e-08 + 1.1404906672396464e-06
        p = p * t + -1.343835083389422e-05
        p = p * t + 8.782843360677361e-05
        p = p * t + -0.0003092446131631732
        p = p * t + 4.3758769606938586e-05
        p = p * t + 0.0069117117673158646
        p = p * t + -0.05242761969566345
        p = p * t + -0.4592227041721344
        p = p * t + -1.151104211807251
    else:
        p = t * -1.367647655570181e-06 + 2.2613054170506075e-05
        p = p * t + -0.00011206359340576455
        p = p * t + -0.00029911872115917504
        p = p * t + 0.007249477785080671
        p = p * t + -0.052604883909225464
        p = p * t + -0.4591796100139618
        p = p * t + -1.151107668876648
    erf = (1.0 - tl.exp2(p * t)).to(tl.int32, bitcast=True) | (x.to(tl.int32, bitcast=True) & -2147483648)
    return erf.to(tl.float32, bitcast=True) * 0.5 + 0.5


@triton.jit
def _value_and_slope(x, KIND: tl.constexpr, WIDE: tl.constexpr):
    """The activation of an FP32 tile and its derivative; ReLU's caller knows the derivative."""
    if KIND == 0:
        cdf = _normal_cdf(x, WIDE)
        value = x * cdf
        slope = cdf + x * tl.exp2(x * x * -0.7213475204444817 - 1.3257480647361592)
    elif KIND == 1:
        squared = x * x
        tanh = 2.0 * _logistic(x * (1.5957691216057308 + 0.07135481627260025 * squared)) - 1.0
        cdf = tanh * 0.5 + 0.5
        value = x * cdf
        slope = cdf + x * (1.0 - tanh * tanh) * (0.3989422804014327 + 0.053516112204450184 * squared)
    elif KIND == 2:
        s = _logistic(x)
        value = x * s
        slope = s * (1.0 + x * (1.0 - s))
    elif KIND == 3:
        value = tl.where(x <= 0.0, 0.0, x)  # NaN stays
        slope = x
    else:
        s = _logistic(1.702 * x)
        value = x * s
        slope = s * (1.0 + 1.702 * x * (1.0 - s))
    return value, slope


@triton.jit
def _round(x, DTYPE: tl.constexpr, PACKED: tl.constexpr):
    """An FP32 tile rounded to half."""
    if not PACKED:
        y = x.to(DTYPE)
    elif DTYPE == tl.bfloat16:  # noqa: SIM300
        y = tl.inline_asm_elementwise("cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,r,r", [x], tl.bfloat16, True, 2)
    else:
        y = tl.inline_asm_elementwise("cvt.rn.f16x2.f32 $0, $2, $1;", "=r,r,r", [x], tl.float16, True, 2)
    return y


@triton.jit
def _wide(x, PACKED: tl.constexpr):
    """A half tile as FP32; with PACKED and BF16 in one instruction an element.

    Not for a tile that is quantized next: Triton would transpose bytes then, which its release 3.6 does wrongly, and
    not half values.
    """
    if PACKED and x.dtype == tl.bfloat16:
        bits = tl.inline_asm_elementwise(
            "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;", "=&r,=r,r", [x], tl.int32, True, 2
        )
        y = bits.to(tl.float32, bitcast=True)
    else:
        y = x.to(tl.float32)
    return y


@triton.jit
def _product(a, b, PACKED: tl.constexpr):
    """The product of two half tiles, rounded to half."""
    if not PACKED:
        y = (a.to(tl.float32) * b.to(tl.float32)).to(a.dtype)
    elif a.dtype == tl.bfloat16:
        y = tl.inline_asm_elementwise("mul.rn.bf16x2 $0, $1, $2;", "=r,r,r", [a, b], tl.bfloat16, True, 2)
    else:
        y = tl.inline_asm_elementwise("mul.rn.f16x2 $0, $1, $2;", "=r,r,r", [a, b], tl.float16, True, 2)
    return y


@triton.jit
def _tile(ptr, first_row, first_col, m, n, stride):
    """Addresses of the rows ``m`` and columns ``n`` of a tile; its first element may need an index of 64 bits."""
    return ptr + (first_row * stride + first_col) + (m[:, None] * stride + n[None, :])


@triton.jit
def _write(
    y, out_ptr, row_ptr, col_ptr, scale_ptr, scale_inv_ptr, amax_ptr, sums_ptr, m, n, pid, tile_row, first_row,
    first_col, rows_left, cols_left, rows, stride,
    FP8_MAX: tl.constexpr, QUANTIZE: tl.constexpr, ROWWISE: tl.constexpr, COLUMNWISE: tl.constexpr,
    RECORD: tl.constexpr, SUMS: tl.constexpr, PACKED: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """Write a half tile ``y`` with HALF, and what was asked for of its quantized form."""
    inside = (m < rows_left)[:, None] & (n < cols_left)[None, :]
    if HALF:
        tl.store(_tile(out_ptr, first_row, first_col, m, n, stride), y, mask=inside)
    if QUANTIZE:
        x = y.to(tl.float32)
        if RECORD:
            raise_amax(amax_ptr.to(tl.pointer_type(tl.int32), bitcast=True), x)
        if SUMS:
            tl.store(sums_ptr + (tile_row * stride + first_col) + n, tl.sum(x, axis=0), mask=n < cols_left)
        scale = tl.load(scale_ptr)
        if pid == 0:
            tl.store(scale_inv_ptr, tl.div_rn(tl.full((), 1.0, tl.float32), scale))
        q = x * scale
        if not PACKED:  # what converts on a GPU saturates, too
            q = saturate(q, FP8_MAX)
        q = q.to(row_ptr.dtype.element_ty)
        if ROWWISE:
            # Of the sum, not of what a function returns: there the hint is lost.
            places = row_ptr + (first_row * stride + first_col) + (m[:, None] * stride + n[None, :])
            tl.store(tl.max_contiguous(places, [1, _ROW_RUN]), q, mask=inside)
        if COLUMNWISE:
            flipped = (n < cols_left)[:, None] & (m < rows_left)[None, :]
            tl.store(_tile(col_ptr, first_col, first_row, n, m, rows), tl.trans(q), mask=flipped)


@triton.jit(do_not_specialize_on_alignment=["scale_ptr", "scale_inv_ptr", "amax_ptr"])
def _forward_kernel(
    x_ptr, up_ptr, out_ptr, row_ptr, col_ptr, scale_ptr, scale_inv_ptr, amax_ptr, rows, cols, x_stride, up_stride,
    KIND: tl.constexpr, GATED: tl.constexpr, FP8_MAX: tl.constexpr, ROWWISE: tl.constexpr, COLUMNWISE: tl.constexpr,
    RECORD: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, PACKED: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    tiles_n = tl.cdiv(cols, BN)
    pid = tl.program_id(0).to(tl.int64)
    tile_row = pid // tiles_n
    first_row, first_col = tile_row * BM, (pid % tiles_n) * BN
    m, n = tl.arange(0, BM), tl.arange(0, BN)
    rows_left, cols_left = (rows - first_row).to(tl.int32), (cols - first_col).to(tl.int32)
    inside = (m < rows_left)[:, None] & (n < cols_left)[None, :]
    half = out_ptr.dtype.element_ty
    x_places = _tile(x_ptr, first_row, first_col, m, n, x_stride)
    x = tl.load(x_places, mask=inside, other=0.0)
    value, _ = _value_and_slope(_wide(x, PACKED), KIND, half == tl.float16)
    y = _round(value, half, PACKED)
    if GATED:
        up = tl.load(_tile(up_ptr, first_row, first_col, m, n, up_stride), mask=inside, other=0.0)
        y = _product(y, up, PACKED)
    _write(
        y, out_ptr, row_ptr, col_ptr, scale_ptr, scale_inv_ptr, amax_ptr, amax_ptr, m, n, pid, tile_row, first_row,
        first_col, rows_left, cols_left, rows, cols, FP8_MAX, True, ROWWISE, COLUMNWISE, RECORD, False, PACKED, HALF,
    )  # fmt: skip


@triton.jit(
    do_not_specialize_on_alignment=[
        "scale_ptr", "scale_inv_ptr", "amax_ptr", "sums_ptr", "up_scale_ptr", "up_scale_inv_ptr", "up_amax_ptr",
        "up_sums_ptr",
    ]
)  # fmt: skip
def _backward_kernel(
    grad_ptr, x_ptr, up_ptr,
    dx_ptr, row_ptr, col_ptr, scale_ptr, scale_inv_ptr, amax_ptr, sums_ptr,
    dup_ptr, up_row_ptr, up_col_ptr, up_scale_ptr, up_scale_inv_ptr, up_amax_ptr, up_sums_ptr,
    rows, cols, grad_stride, x_stride, up_stride, out_stride,
    KIND: tl.constexpr, GATED: tl.constexpr,
    FP8_MAX: tl.constexpr, QUANTIZE: tl.constexpr, ROWWISE: tl.constexpr, COLUMNWISE: tl.constexpr,
    RECORD: tl.constexpr, SUMS: tl.constexpr,
    UP_FP8_MAX: tl.constexpr, UP_QUANTIZE: tl.constexpr, UP_ROWWISE: tl.constexpr, UP_COLUMNWISE: tl.constexpr,
    UP_RECORD: tl.constexpr, UP_SUMS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, TWICE: tl.constexpr,
    PACKED: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    tiles_n = tl.cdiv(cols, BN)
    pid = tl.program_id(0).to(tl.int64)
    tile_row = pid // tiles_n
    first_row, first_col = tile_row * BM, (pid % tiles_n) * BN
    m, n = tl.arange(0, BM), tl.arange(0, BN)
    rows_left, cols_left = (rows - first_row).to(tl.int32), (cols - first_col).to(tl.int32)
    inside = (m < rows_left)[:, None] & (n < cols_left)[None, :]
    half = dx_ptr.dtype.element_ty
    x_places = _tile(x_ptr, first_row, first_col, m, n, x_stride)
    grad_places = _tile(grad_ptr, first_row, first_col, m, n, grad_stride)
    x = tl.load(x_places, mask=inside, other=0.0)
    dy = tl.load(grad_places, mask=inside, other=0.0)
    if GATED:
        value, slope = _value_and_slope(_wide(x, PACKED), KIND, half == tl.float16)
        dup = _product(dy, _round(value, half, PACKED), PACKED)
        _write(
            dup, dup_ptr, up_row_ptr, up_col_ptr, up_scale_ptr, up_scale_inv_ptr, up_amax_ptr, up_sums_ptr, m, n, pid,
            tile_row, first_row, first_col, rows_left, cols_left, rows, out_stride, UP_FP8_MAX, UP_QUANTIZE, UP_ROWWISE,
            UP_COLUMNWISE, UP_RECORD, UP_SUMS, PACKED, HALF,
        )  # fmt: skip
        if TWICE:
            x = tl.load(x_places, mask=inside, other=0.0)
            dy = tl.load(grad_places, mask=inside, other=0.0)
        up = tl.load(_tile(up_ptr, first_row, first_col, m, n, up_stride), mask=inside, other=0.0)
        dy = _product(dy, up, PACKED)
    x = _wide(x, PACKED)
    dy = _wide(dy, PACKED)
    _, slope = _value_and_slope(x, KIND, half == tl.float16)
    if KIND == 3:
        dx = tl.where(x <= 0.0, 0.0, dy)
    else:
        dx = dy * slope
    dx = _round(dx, half, PACKED)
    _write(
        dx, dx_ptr, row_ptr, col_ptr, scale_ptr, scale_inv_ptr, amax_ptr, sums_ptr, m, n, pid, tile_row, first_row,
        first_col, rows_left, cols_left, rows, out_stride, FP8_MAX, QUANTIZE, ROWWISE, COLUMNWISE, RECORD, SUMS, PACKED,
        HALF,
    )  # fmt: skip


@cache
def _launcher(kernel: Any, warps: int) -> Launcher:
    return Launcher(kernel, num_warps=warps)


def _even(rows: int, cols: int, *tensors: Tensor) -> bool:
    """Whether Triton compiles a kernel for ``tensors`` as for all such tensors of the same dtypes."""
    if rows % 16 or cols % 16:
        return False
    return not any(t.data_ptr() % 16 or t.stride(0) % 16 for t in tensors)


def _programs(rows: int, cols: int, tile: Tile) -> int:
    return -(-rows // tile.rows) * -(-cols // tile.cols)


def activate(
    kind: str, parts: tuple[Tensor, ...], target: Target, tile: Tile = FORWARD_TILE, half: bool = True
) -> Made:
    """The activation of ``parts``, quantized.

    Args:
        kind: of ``KINDS``.
        parts: half [rows, features] on a GPU, contiguous within a row, at least one element; of a gated activation the
            gate and what its activation is multiplied with.
        target: has no sums.
        half: whether the half values are wanted.
    """
    x, up = parts[0], parts[-1]
    rows, cols = x.shape
    made = _allocate(x, rows, cols, target, tile, half)
    out = x if made.half is None else made.half
    row, col = _both(made)
    records, gated = target.record is not None, len(parts) == 2
    key = None
    if _even(rows, cols, x, up, out):
        key = "forward", kind, x.dtype, gated, target.fmt.dtype, target.rowwise, target.columnwise, records, tile, half
    _launcher(_forward_kernel, tile.warps)(
        x.get_device(), key, _programs(rows, cols, tile),
        (
            x, up, out, row, col, target.scale, made.scale_inv, target.record if records else target.scale,
            rows, cols, x.stride(0), up.stride(0),
        ),
        lambda: {
            "KIND": KINDS.index(kind), "GATED": gated, "FP8_MAX": target.fmt.max, "ROWWISE": target.rowwise,
            "COLUMNWISE": target.columnwise, "RECORD": records, "BM": tile.rows, "BN": tile.cols,
            "PACKED": tile.packed, "HALF": half,
        },
    )  # fmt: skip
    return made


def activate_backward(
    kind: str, grad: Tensor, parts: tuple[Tensor, ...], targets: list[Target | None], joint: bool = False,
    gate_first: bool = True, tile: Tile | None = None, half: bool = True,
) -> list[Made]:  # fmt: skip
    """The gradients of ``parts``, quantized.

    Args:
        kind, parts: as for ``activate``.
        grad: of its result: half [rows, features], contiguous within a row.
        targets: one for each part; None for a gradient that nobody reads in FP8.
        joint: whether the gradients of both parts lie side by side in one [rows, 2 * features], quantized as one
            tensor. ``targets`` has one entry then, and so has the result.
        gate_first: whether the gate's gradient is the first half of a joint one.
        tile: None for what is right.
        half: whether the half values are wanted of those that are quantized.

    Returns:
        One ``Made`` for each target.
    """
    x, up = parts[0], parts[-1]
    rows, cols = x.shape
    gated, stride = len(parts) == 2, 2 * cols if joint else cols
    if tile is None:
        sums = any(target is not None and target.sums for target in targets)
        of_gated = GATED_BACKWARD_TILE_WITH_SUMS if sums else GATED_BACKWARD_TILE
        tile = of_gated if gated else BACKWARD_TILE
    half = half or any(target is None for target in targets)
    made = [_allocate(x, rows, stride, target, tile, half) for target in targets]
    if joint:
        first, second = _halves(made[0], cols)
        of_x, of_up = (first, second) if gate_first else (second, first)
        target, up_target = targets[0], targets[0]
    else:
        of_x, of_up = made[0], made[-1]
        target, up_target = targets[0], targets[-1]
    constants: dict[str, Any] = {"KIND": KINDS.index(kind), "GATED": gated}
    pointers: list[Any] = []
    for prefix, result, wanted in (("", of_x, target), ("UP_", of_up, up_target)):
        row, col = _both(result)
        records, sums = wanted is not None and wanted.record is not None, wanted is not None and wanted.sums
        out = x if result.half is None else result.half
        scale = out if wanted is None else wanted.scale  # any tensor, where the kernel reads none
        scale_inv = out if result.scale_inv is None else result.scale_inv
        record = wanted.record if wanted is not None and records else scale
        pointers += [out, row, col, scale, scale_inv, record, result.sums if sums else scale]
        constants |= {
            f"{prefix}FP8_MAX": 0.0 if wanted is None else wanted.fmt.max, f"{prefix}QUANTIZE": wanted is not None,
            f"{prefix}ROWWISE": wanted is not None and wanted.rowwise,
            f"{prefix}COLUMNWISE": wanted is not None and wanted.columnwise, f"{prefix}RECORD": records,
            f"{prefix}SUMS": sums,
        }  # fmt: skip
    constants |= {"BM": tile.rows, "BN": tile.cols, "TWICE": tile.reads_twice, "PACKED": tile.packed, "HALF": half}
    key = ("backward", x.dtype, *constants.values(), tile.warps)
    even = _even(rows, cols, grad, x, up, *(t for t in (of_x.half, of_up.half) if t is not None))
    _launcher(_backward_kernel, tile.warps)(
        x.get_device(), key if even else None, _programs(rows, cols, tile),
        (grad, x, up, *pointers, rows, cols, grad.stride(0), x.stride(0), up.stride(0), stride), lambda: constants,
    )  # fmt: skip
    return [m if m.sums is None else m._replace(sums=m.sums.sum(0)) for m in made]


def _allocate(like: Tensor, rows: int, cols: int, target: Target | None, tile: Tile, half: bool) -> Made:
    """Uninitialised results; ``sums`` has a row for each row of tiles."""
    out = like.new_empty((rows, cols)) if half else None
    if target is None:
        return Made(out)
    return Made(
        out,
        like.new_empty((rows, cols), dtype=target.fmt.dtype) if target.rowwise else None,
        like.new_empty((cols, rows), dtype=target.fmt.dtype) if target.columnwise else None,
        new(like.get_device(), (1,), torch.float32),
        like.new_empty((-(-rows // tile.rows), cols), dtype=torch.float32) if target.sums else None,
    )


def _halves(made: Made, cols: int) -> tuple[Made, Made]:
    """The two halves of a joint result."""

    def half(part: slice) -> Made:
        half, row, sums = (None if t is None else t[:, part] for t in (made.half, made.row, made.sums))
        return Made(half, row, None if made.col is None else made.col[part], made.scale_inv, sums)

    return half(slice(0, cols)), half(slice(cols, 2 * cols))


def _both(made: Made) -> tuple[Any, Any]:
    """FP8 tensors for both orientations: one stands for the other where that is not wanted, ``half`` for none."""
    row = made.col if made.row is None else made.row
    col = made.row if made.col is None else made.col
    return (made.half if row is None else row), (made.half if col is None else col)

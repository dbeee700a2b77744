"""Fused per-tensor quantization to FP8 on a GPU: scale, saturate, cast, transpose and amax at once.

Data and scales are bit for bit those of ``formats``. Importing this file needs Triton.

An amax is compared by its bits: magnitudes order as integers do, infinity above every finite number and NaN above
infinity. So a NaN is recorded, as in the reference; a maximum of floats would skip it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from nemo_lowprec.compat.triton import current_device
from nemo_lowprec.formats.floats import FloatFormat
from nemo_lowprec.kernels.launcher import Launcher
from nemo_lowprec.kernels.memory import new, zero

_TILE_ROWS, _TILE_COLS, _WARPS = 64, 128, 4
_TILE = {"BM": _TILE_ROWS, "BN": _TILE_COLS}
TYPES = {
    torch.float32: tl.float32,
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
    torch.float8_e4m3fn: tl.float8e4nv,
    torch.uint8: tl.uint8,  # E5M3
    torch.int8: tl.int8,  # E2M5
}


def is_supported() -> bool:
    """Whether the kernels round as the reference does here.

    Before compute capability 9.0 some versions of Triton go through FP16 on the way to FP8 and round twice.
    """
    return torch.cuda.is_available() and torch.version.cuda is not None and torch.cuda.get_device_capability() >= (9, 0)


@triton.jit
def raise_amax(amax_ptr, x):
    """Raise an amax (the bits of an FP32 number) to the largest magnitude of an FP32 tile."""
    bits = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    largest = tl.max(tl.ravel(bits, can_reorder=True), axis=0)
    # Most tiles do not raise the amax: the comparison saves their atomic.
    if largest > tl.load(amax_ptr):
        tl.atomic_max(amax_ptr, largest, sem="relaxed")


@triton.jit
def saturate(x, FP8_MAX: tl.constexpr):
    """Clamp to the format's range; comparisons with NaN are false, so that NaN stays."""
    x = tl.where(x > FP8_MAX, FP8_MAX, x)
    return tl.where(x < -FP8_MAX, -FP8_MAX, x)


@triton.jit
def _amax_kernel(x_ptr, amax_ptr, rows, cols, stride_m, stride_n, BM: tl.constexpr, BN: tl.constexpr):
    tiles_n = tl.cdiv(cols, BN)
    pid = tl.program_id(0).to(tl.int64)
    m = (pid // tiles_n) * BM + tl.arange(0, BM)
    n = (pid % tiles_n) * BN + tl.arange(0, BN)
    inside = (m < rows)[:, None] & (n < cols)[None, :]
    x = tl.load(x_ptr + m[:, None] * stride_m + n[None, :] * stride_n, mask=inside, other=0.0).to(tl.float32)
    raise_amax(amax_ptr.to(tl.pointer_type(tl.int32), bitcast=True), x)


# Scales and amaxes are entries of a table: the alignment of their addresses must not multiply the compiled variants.
@triton.jit(do_not_specialize_on_alignment=["scale_ptr", "scale_inv_ptr", "amax_ptr", "sums_ptr"])
def _cast_kernel(
    x_ptr,
    scale_ptr,
    scale_inv_ptr,
    row_ptr,
    col_ptr,
    amax_ptr,
    sums_ptr,
    rows,
    cols,
    stride_m,
    stride_n,
    row_stride,
    col_stride,
    margin_factor,
    FP8_MAX: tl.constexpr,
    FROM_AMAX: tl.constexpr,
    ROWWISE: tl.constexpr,
    COLUMNWISE: tl.constexpr,
    RECORD: tl.constexpr,
    SUMS: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
):
    tiles_n = tl.cdiv(cols, BN)
    pid = tl.program_id(0).to(tl.int64)
    m = (pid // tiles_n) * BM + tl.arange(0, BM)
    n = (pid % tiles_n) * BN + tl.arange(0, BN)
    inside = (m < rows)[:, None] & (n < cols)[None, :]
    x = tl.load(x_ptr + m[:, None] * stride_m + n[None, :] * stride_n, mask=inside, other=0.0).to(tl.float32)

    if RECORD:
        raise_amax(amax_ptr.to(tl.pointer_type(tl.int32), bitcast=True), x)
    if SUMS:
        tl.store(sums_ptr + (pid // tiles_n) * cols + n, tl.sum(x, axis=0), mask=n < cols)

    scale = tl.load(scale_ptr)
    if FROM_AMAX:
        # compute_scale() of formats/, for the amax that the first pass has stored in the scale's place.
        largest = scale
        scale = tl.div_rn(tl.full((), FP8_MAX, tl.float32), largest) * margin_factor
        scale = tl.where(scale > 3.4028234663852886e38, 3.4028234663852886e38, scale)
        scale = tl.where((largest > 0.0) & (largest <= 3.4028234663852886e38), scale, 1.0)
    if pid == 0:
        tl.store(scale_inv_ptr, tl.div_rn(tl.full((), 1.0, tl.float32), scale))

    q = (x * scale).to(row_ptr.dtype.element_ty)  # the GPU's conversion saturates, and keeps NaN
    if ROWWISE:
        tl.store(row_ptr + m[:, None] * row_stride + n[None, :], q, mask=inside)
    if COLUMNWISE:
        flipped = (n < cols)[:, None] & (m < rows)[None, :]
        tl.store(col_ptr + n[:, None] * col_stride + m[None, :], tl.trans(q), mask=flipped)


_amax = Launcher(_amax_kernel, num_warps=_WARPS)
_cast = Launcher(_cast_kernel, num_warps=_WARPS)


def _tile() -> dict[str, int]:
    return _TILE


def amax(values: Tensor) -> Tensor:
    """Largest magnitude of a 2-D CUDA tensor as FP32 [1]: 0 for no element, NaN where one is NaN."""
    device = values.get_device()
    largest = zero(device)
    if values.numel():
        rows, cols = values.shape
        even = not (rows % 16 or cols % 16 or values.data_ptr() % 16) and values.is_contiguous()
        programs = -(-rows // _TILE_ROWS) * -(-cols // _TILE_COLS)
        _amax(device, values.dtype if even else None, programs, (values, largest, rows, cols, *values.stride()), _tile)
    return largest


def quantize(
    values: Tensor,
    scale: Tensor,
    fmt: FloatFormat,
    rowwise: bool,
    columnwise: bool,
    record: Tensor | None = None,
    margin: int | None = None,
    out: Tensor | None = None,
    sums: Tensor | None = None,
    flipped_out: Tensor | None = None,
    scale_inv: Tensor | None = None,
) -> tuple[Tensor | None, Tensor | None, Tensor]:
    """Quantize in one pass over the tensor.

    Args:
        values: [rows, cols], FP32 or half, any strides, on a GPU.
        scale: FP32 [1]; with ``margin`` the amax of ``values``, from which the kernel computes the scale.
        fmt: format of the result.
        rowwise, columnwise: orientations that are wanted.
        record: FP32 [1], raised to the tensor's amax where the amax is larger.
        out: [rows, cols], contiguous within a row, filled with the rowwise result.
        sums: of ``new_sums``, filled with the sums of the columns of half ``values``, for each row of tiles.
        flipped_out: [cols, rows], contiguous within a row, filled with the columnwise result.
        scale_inv: FP32 [1], filled with 1 / scale.

    Returns:
        [rows, cols], its transpose [cols, rows] (None where not wanted) and 1 / scale, FP32 [1].
    """
    rows, cols = values.shape
    dtype, device = values.dtype, values.get_device()
    records, from_amax, adds = record is not None, margin is not None, sums is not None
    key = None
    if not (rows % 16 or cols % 16 or values.data_ptr() % 16) and values.is_contiguous():
        key = dtype, fmt.dtype, from_amax, rowwise, columnwise, records, adds
    if columnwise and dtype == torch.float32:
        # Triton 3.6 transposes an 8-bit tile that was loaded as FP32 wrongly (half of its elements; seen on an H200).
        row, _, inverse = quantize(values, scale, fmt, True, False, record, margin, out, scale_inv=scale_inv)
        assert row is not None
        turned = row.t().contiguous() if flipped_out is None else flipped_out.copy_(row.t())
        return row if rowwise else None, turned, inverse
    row, col = out, flipped_out
    if rowwise and row is None:
        row = values.new_empty((rows, cols), dtype=fmt.dtype)
    if columnwise and col is None:
        col = values.new_empty((cols, rows), dtype=fmt.dtype)
    if not rows or not cols:
        if sums is not None:
            sums.zero_()
        return (
            row,
            col,
            torch.ones(1, device=values.device, dtype=torch.float32) if scale_inv is None else scale_inv.fill_(1.0),
        )
    scale_inv = new(device, (1,), torch.float32) if scale_inv is None else scale_inv
    _cast(
        device, key if _are_even(out, flipped_out) else None, -(-rows // _TILE_ROWS) * -(-cols // _TILE_COLS),
        (
            values, scale, scale_inv, col if row is None else row, row if col is None else col,
            record if records else scale, sums if adds else scale, rows, cols, *values.stride(),
            cols if row is None else row.stride(0), rows if col is None else col.stride(0), 2.0 ** -(margin or 0),
        ),
        lambda: {
            "FP8_MAX": fmt.max, "FROM_AMAX": from_amax, "ROWWISE": rowwise, "COLUMNWISE": columnwise,
            "RECORD": records, "SUMS": adds, **_TILE,
        },
    )  # fmt: skip
    return row, col, scale_inv


def quantize_again(
    values: Tensor, rows: int, cols: int, scale: Tensor | None, fmt: FloatFormat, record: Tensor | None, margin: int
) -> tuple[Tensor, Tensor, Tensor] | None:
    """``quantize`` in both orientations, in few steps; None where no kernel was compiled for such values.

    Args:
        values: half [..., cols], contiguous, of ``rows`` in all; ``rows`` and ``cols`` are multiples of 16.
        scale, record: as for ``quantize``. ``scale`` is None for that of the tensor's own amax, with ``margin``.
    """
    device, dtype, own = values.get_device(), fmt.dtype, scale is None
    launch = _cast.forms.get((device, (values.dtype, dtype, own, True, True, record is not None, False)))
    if launch is None or values.data_ptr() % 16 or device != current_device():  # type: ignore[misc]
        return None
    programs = -(-rows // _TILE_ROWS) * -(-cols // _TILE_COLS)
    if scale is None:
        measure = _amax.forms.get((device, values.dtype))
        if measure is None:
            return None
        scale = zero(device)
        measure(programs, values, scale, rows, cols, cols, 1)
    row, col = new(device, (rows, cols), dtype), new(device, (cols, rows), dtype)
    scale_inv = new(device, (1,), torch.float32)
    launch(
        programs, values, scale, scale_inv, row, col, scale if record is None else record, scale, rows, cols, cols, 1,
        cols, rows, 2.0**-margin if own else 1.0,
    )  # fmt: skip
    return row, col, scale_inv


def quantize_current(
    values: Tensor,
    fmt: FloatFormat,
    margin: int,
    rowwise: bool,
    columnwise: bool,
    out: Tensor | None = None,
    sums: Tensor | None = None,
) -> tuple[Tensor | None, Tensor | None, Tensor]:
    """``quantize`` with the scale of the tensor's own amax, in two passes and without a host sync."""
    return quantize(values, amax(values), fmt, rowwise, columnwise, margin=margin, out=out, sums=sums)


def new_sums(values: Tensor) -> Tensor:
    """Memory for ``quantize``'s ``sums``: FP32 [1, rows of tiles, cols], which ``triton_sums.add_up`` adds up."""
    rows, cols = values.shape
    return torch.empty(1, -(-rows // _TILE_ROWS), cols, dtype=torch.float32, device=values.device)


def _are_even(*results: Tensor | None) -> bool:
    """Whether the addresses and strides of results are multiples of 16, for which Triton compiles a form of its own."""
    return not any(t is not None and (t.data_ptr() % 16 or t.stride(0) % 16) for t in results)

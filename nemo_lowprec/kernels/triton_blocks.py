"""Fused kernels for tensors in blocks of a row: quantize, accumulate, and the norms of many gradients at once.

Data and exponents are bit for bit those of ``formats.block_scale_128``. Importing this file needs Triton.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from nemo_lowprec.compat.triton import current_device
from nemo_lowprec.formats.block_scale_128 import block_grid, exponent_rule
from nemo_lowprec.formats.floats import E4M3, FloatFormat
from nemo_lowprec.formats.stochastic import rounding_rule
from nemo_lowprec.kernels.launcher import Launcher
from nemo_lowprec.kernels.memory import new, zero
from nemo_lowprec.kernels.multi_tensor import TILES, PointerTable, tile_table
from nemo_lowprec.kernels.triton_cast import TYPES, saturate
from nemo_lowprec.kernels.triton_stochastic import mix, round_stochastic

_BLOCKS, _WARPS = 8, 1
_NORM_BLOCKS, _NORM_WARPS = 32, 4
GROUP = tl.constexpr(TILES)


@triton.jit
def finite(x):
    """``x`` with NaN for infinities: an infinity times zero is NaN, and a finite number times zero adds nothing."""
    return tl.fma(x, 0.0, x)


@triton.jit
def exponents_of(amax, TOP: tl.constexpr, MANTISSA: tl.constexpr):
    """Stored exponents (int32) for finite amaxes, given as the bits of FP32 numbers; see ``block_exponent``."""
    exponent = (amax >> 23) - TOP + ((amax & 0x7FFFFF) > MANTISSA).to(tl.int32)
    exponent = tl.minimum(tl.maximum(exponent, 27), 254)
    return tl.where(amax > 0, exponent, 127)


@triton.jit
def block_amax(x):
    """Largest finite magnitudes of the blocks of a tile [blocks, 128], as the bits of FP32 numbers (int32)."""
    largest = tl.max(tl.abs(finite(x)), axis=1)  # skips NaN
    return tl.maximum(largest, 0.0).to(tl.int32, bitcast=True)


@triton.jit
def power_of_two(exponent):
    """2**(exponent - 127) as FP32."""
    return (exponent << 23).to(tl.float32, bitcast=True)


@triton.jit
def decoded(first, offset, inside):
    """FP32 values of stored elements, without their scales; uint8 is E5M3, and int8 is E2M5."""
    dtype: tl.constexpr = first.dtype.element_ty
    if tl.uint8 == dtype:
        x = tl.load(first + offset, mask=inside, other=0).to(tl.int16) << 7
        x = x.to(tl.float16, bitcast=True).to(tl.float32)
    elif tl.int8 == dtype:
        code = tl.load(first + offset, mask=inside, other=0).to(tl.int32)
        size = tl.abs(code)
        x = tl.where(size < 32, size.to(tl.float32) * 0.03125, ((size + 4032) << 18).to(tl.float32, bitcast=True))
        x = tl.where(code == -128, float("nan"), tl.where(code < 0, -x, x))
    else:
        x = tl.load(first + offset, mask=inside, other=0.0).to(tl.float32)
    return x


@triton.jit
def to_stored(x, exponent, dtype: tl.constexpr):
    """A tile times the scales of its blocks, rounded to ``dtype``; non-finite elements become NaN."""
    return (finite(x) * power_of_two(254 - exponent)[:, None]).to(dtype)


@triton.jit
def keep_positive(scaled, amax, SMALLEST: tl.constexpr):
    """``scaled``, raised to SMALLEST in blocks of a positive amax."""
    least = tl.where(amax > 0, SMALLEST, 0.0)[:, None]
    return tl.maximum(scaled, least, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def tile_at(first, cols, per_row, total, FLAT: tl.constexpr, BLOCKS: tl.constexpr):
    """The tile of a tensor that begins at block ``first`` (int64).

    Returns the tile's blocks [BLOCKS]; and [BLOCKS, 128]: whether an element is inside the tensor, its row, its column,
    and its offset in a contiguous tensor. Rows of FLAT tensors are whole blocks."""
    block = first + tl.arange(0, BLOCKS)
    lane = tl.arange(0, 128)
    inside = (block < total)[:, None] & (lane >= 0)[None, :]
    row, col = (block // per_row)[:, None], (block % per_row)[:, None] * 128 + lane[None, :]
    if FLAT:
        offset = first * 128 + (tl.arange(0, BLOCKS)[:, None] * 128 + lane[None, :])
    else:
        inside = inside & (col < cols)
        offset = row * cols + col
    return block, inside, row, col, offset


@triton.jit(
    do_not_specialize=["count", "per_row", "total"], do_not_specialize_on_alignment=["factor_ptr", "nonfinite_ptr"]
)
def _quantize_kernel(
    x_ptr, data_ptr, exponent_ptr, factor_ptr, nonfinite_ptr, alpha, count, cols, per_row, total, stride_r, stride_c,
    FLAT: tl.constexpr, ACCUMULATE: tl.constexpr, TOP: tl.constexpr, MANTISSA: tl.constexpr, ROUND_BITS: tl.constexpr,
    ROUND_SMALLEST: tl.constexpr, SMALLEST: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0).to(tl.int64) * BLOCKS
    block, inside, row, col, offset = tile_at(first, cols, per_row, total, FLAT, BLOCKS)
    source = offset if FLAT else row * stride_r + col * stride_c
    x = tl.load(x_ptr + source, mask=inside, other=0.0).to(tl.float32)
    if ACCUMULATE:
        old = tl.load(data_ptr + offset, mask=inside, other=0.0).to(tl.float32)
        exponent = tl.load(exponent_ptr + block, mask=block < total, other=127).to(tl.int32)
        x = (old * power_of_two(exponent)[:, None]) * tl.load(factor_ptr) + alpha * x
    bits = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    if tl.max(tl.max(bits, axis=1), axis=0) >= 0x7F800000:
        tl.store(nonfinite_ptr, 1.0)
    amax = block_amax(x)
    exponent = exponents_of(amax, TOP, MANTISSA)
    scaled = to_stored(x, exponent, tl.float32)
    if SMALLEST > 0:
        scaled = keep_positive(scaled, amax, SMALLEST)
    if ACCUMULATE:
        salts = scaled.to(tl.uint32, bitcast=True) ^ mix(count.to(tl.uint32))
        scaled = round_stochastic(scaled, offset.to(tl.uint32), salts, ROUND_BITS, ROUND_SMALLEST)
    tl.store(data_ptr + offset, scaled.to(data_ptr.dtype.element_ty), mask=inside)
    tl.store(exponent_ptr + block, exponent.to(tl.uint8), mask=block < total)


_quantize = Launcher(_quantize_kernel, num_warps=_WARPS, enable_fp_fusion=False)


def _launch(
    values: Tensor, data: Tensor, exponent: Tensor, factor: Tensor, nonfinite: Tensor, fmt: FloatFormat,
    alpha: float = 1.0, count: int = 0, positive: bool = False,
) -> None:  # fmt: skip
    rows, cols, per_row = block_grid(values.shape)
    matrix = values if values.dim() == 2 else values.reshape(rows, cols)
    total = rows * per_row
    if total == 0:
        return
    flat = cols % 128 == 0 and matrix.is_contiguous()
    key = None
    if flat and not (matrix.data_ptr() % 16 or data.data_ptr() % 16 or exponent.data_ptr() % 16):
        key = matrix.dtype, fmt.name, count > 0, positive
    args = matrix, data, exponent, factor, nonfinite, alpha, count, cols, per_row, total, *matrix.stride()
    _quantize(
        values.get_device(), key, -(-total // _BLOCKS), args,
        lambda: {"FLAT": flat, "ACCUMULATE": count > 0, **_constants(fmt, positive)},
    )  # fmt: skip


@lru_cache(maxsize=16)
def _constants(fmt: FloatFormat, positive: bool) -> dict[str, Any]:
    top, mantissa = exponent_rule(fmt)
    bits, smallest = rounding_rule(fmt.dtype)
    return {
        "TOP": top, "MANTISSA": mantissa, "ROUND_BITS": bits, "ROUND_SMALLEST": smallest,
        "SMALLEST": fmt.smallest if positive else 0.0, "BLOCKS": _BLOCKS,
    }  # fmt: skip


def quantize(values: Tensor, fmt: FloatFormat, positive: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """Quantize a CUDA tensor of any shape and strides in one pass; ``positive`` as in ``quantize_rows``.

    Returns:
        data of the same shape in ``fmt``; exponents, uint8 [rows, blocks of a row]; FP32 [1], 1 where an element is
        not finite, else 0.
    """
    shape, device = values.shape, values.get_device()
    rows, cols, per_row = block_grid(shape)
    if len(shape) == 2 and per_row and not (cols % 128 or values.data_ptr() % 16) and values.is_contiguous():
        launch = _quantize.forms.get((device, (values.dtype, fmt.name, False, positive)))
        if launch is not None and device == current_device():  # type: ignore[misc]
            # As below, in fewer steps.
            data, exponent = new(device, shape, fmt.dtype), new(device, (rows, per_row), torch.uint8)
            nonfinite, total = zero(device), rows * per_row
            launch(
                -(-total // _BLOCKS), values, data, exponent, nonfinite, nonfinite, 1.0, 0, cols, per_row, total, cols,
                1,
            )  # fmt: skip
            return data, exponent, nonfinite
    data = values.new_empty(shape, dtype=fmt.dtype)
    exponent = values.new_empty((rows, per_row), dtype=torch.uint8)
    nonfinite = zero(device)
    _launch(values, data, exponent, nonfinite, nonfinite, fmt, positive=positive)
    return data, exponent, nonfinite


@triton.jit
def _quantize_many_kernel(
    tensor_of_ptr, grid_ptr, address_ptr, nonfinite_ptr, SOURCE: tl.constexpr, TOP: tl.constexpr,
    MANTISSA: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    tensor = tl.load(tensor_of_ptr + tile // GROUP)
    grid, row_of_addresses = grid_ptr + tensor * 4, address_ptr + tensor * 3
    cols, per_row, total = tl.load(grid + 1), tl.load(grid + 2), tl.load(grid + 3)
    source = tl.multiple_of(tl.load(row_of_addresses).to(tl.pointer_type(SOURCE)), 16)
    data = tl.multiple_of(tl.load(row_of_addresses + 1).to(tl.pointer_type(tl.float8e4nv)), 16)
    exponents = tl.load(row_of_addresses + 2).to(tl.pointer_type(tl.uint8))
    block, inside, _, _, offset = tile_at((tile - tl.load(grid)) * BLOCKS, cols, per_row, total, True, BLOCKS)
    x = tl.load(source + offset, mask=inside, other=0.0).to(tl.float32)
    bits = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    if tl.max(tl.max(bits, axis=1), axis=0) >= 0x7F800000:
        tl.store(nonfinite_ptr + tensor, 1.0)
    exponent = exponents_of(block_amax(x), TOP, MANTISSA)
    tl.store(data + offset, to_stored(x, exponent, tl.float32).to(tl.float8e4nv), mask=inside)
    tl.store(exponents + block, exponent.to(tl.uint8), mask=block < total)


_quantize_many = Launcher(_quantize_many_kernel, num_warps=_WARPS, enable_fp_fusion=False)


class QuantizeMany:
    """``quantize_into`` of many tensors to E4M3, in one launch. The addresses stay on the GPU from call to call."""

    def __init__(self) -> None:
        self._pointers = PointerTable()

    @staticmethod
    def takes(values: Tensor) -> bool:
        """Whether ``values`` may be among the tensors."""
        odd = not values.numel() or values.shape[-1] % 128 or values.data_ptr() % 16
        return not odd and values.is_contiguous()

    def __call__(self, values: Sequence[Tensor], into: Sequence[tuple[int, int]], nonfinite: Tensor) -> None:
        """Quantize ``values``, of one dtype and on one GPU.

        Args:
            into: addresses of the data, multiples of 16, and of the exponents, which are filled.
            nonfinite: FP32 [tensors], contiguous.
        """
        first = values[0]
        device = first.get_device()
        table = tile_table(tuple([one.shape for one in values]), _BLOCKS, first.device)
        addresses = [at for one, others in zip(values, into, strict=True) for at in (one.data_ptr(), *others)]
        pointers = self._pointers.upload(addresses, len(values), first.device, ())
        constants = _constants(E4M3, False)
        _quantize_many(
            device, None if nonfinite.data_ptr() % 16 else first.dtype, table.tiles,
            (table.tensor_of, table.grid, pointers, nonfinite),
            lambda: {
                "SOURCE": TYPES[first.dtype], "TOP": constants["TOP"], "MANTISSA": constants["MANTISSA"],
                "BLOCKS": _BLOCKS,
            },
        )  # fmt: skip


def quantize_into(values: Tensor, fmt: FloatFormat, data: Tensor, exponent: Tensor, nonfinite: Tensor) -> None:
    """``quantize`` into memory that is there. ``nonfinite`` becomes 1, or stays as it is."""
    _launch(values, data, exponent, nonfinite, nonfinite, fmt)


def accumulate(
    data: Tensor, exponent: Tensor, factor: Tensor, nonfinite: Tensor, values: Tensor, alpha: float, count: int
) -> None:
    """Add ``alpha * values`` to a stored E4M3 gradient, in place and in one pass. The result has a factor of 1.

    Args:
        count: number of additions, this one included; for stochastic rounding.
    """
    nonfinite.zero_()
    _launch(values, data, exponent, factor, nonfinite, E4M3, float(alpha), count)


# Shards have many shapes: sizes must not multiply the compiled variants.
@triton.jit(do_not_specialize=["cols", "per_row", "total"])
def _cast_kernel(
    data_ptr, exponent_ptr, scale_ptr, out_ptr, cols, per_row, total, FLAT: tl.constexpr, FP8_MAX: tl.constexpr,
    BLOCKS: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0).to(tl.int64) * BLOCKS
    block, inside, _, _, offset = tile_at(first, cols, per_row, total, FLAT, BLOCKS)
    exponent = tl.load(exponent_ptr + block, mask=block < total, other=127).to(tl.int32)
    x = tl.load(data_ptr + offset, mask=inside, other=0.0).to(tl.float32) * power_of_two(exponent)[:, None]
    y = saturate(x * tl.load(scale_ptr), FP8_MAX)
    tl.store(out_ptr + offset, y.to(out_ptr.dtype.element_ty), mask=inside)


def cast_blocks(data: Tensor, exponent: Tensor, scale: Tensor, fmt: FloatFormat) -> Tensor:
    """The values of a CUDA tensor in blocks times ``scale`` (FP32 [1]), rounded to ``fmt`` and saturated.

    Returns:
        contiguous, of the shape of ``data``.
    """
    out = torch.empty(data.shape, dtype=fmt.dtype, device=data.device)
    rows, cols, per_row = block_grid(data.shape)
    total = rows * per_row
    if total:
        assert data.is_contiguous() and exponent.is_contiguous()
        with torch.cuda.device(data.device):
            _cast_kernel[(triton.cdiv(total, _BLOCKS),)](
                data, exponent, scale, out, cols, per_row, total, FLAT=cols % 128 == 0, FP8_MAX=fmt.max,
                BLOCKS=_BLOCKS, num_warps=_WARPS,
            )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["per_row", "total"])
def _dequantize_kernel(
    data_ptr, exponent_ptr, out_ptr, cols, per_row, total, FLAT: tl.constexpr, LARGEST: tl.constexpr,
    BLOCKS: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0).to(tl.int64) * BLOCKS
    block, inside, _, _, offset = tile_at(first, cols, per_row, total, FLAT, BLOCKS)
    exponent = tl.load(exponent_ptr + block, mask=block < total, other=127).to(tl.int32)
    x = tl.load(data_ptr + offset, mask=inside, other=0.0).to(tl.float32) * power_of_two(exponent)[:, None]
    tl.store(out_ptr + offset, saturate(x, LARGEST).to(out_ptr.dtype.element_ty), mask=inside)


_dequantize = Launcher(_dequantize_kernel, num_warps=_WARPS)


def dequantize(data: Tensor, exponent: Tensor, dtype: torch.dtype) -> Tensor:
    """The values of a CUDA tensor in blocks, rounded to ``dtype`` (FP32, FP16 or BF16) and saturated; contiguous."""
    out = torch.empty(data.shape, dtype=dtype, device=data.device)
    rows, cols, per_row = block_grid(data.shape)
    total = rows * per_row
    if total:
        assert data.is_contiguous() and exponent.is_contiguous()
        flat = cols % 128 == 0
        key = None
        if flat and not (data.data_ptr() % 16 or exponent.data_ptr() % 16 or out.data_ptr() % 16):
            key = data.dtype, dtype
        args = data, exponent, out, cols, per_row, total
        _dequantize(
            data.get_device(), key, -(-total // _BLOCKS), args,
            lambda: {"FLAT": flat, "LARGEST": torch.finfo(dtype).max, "BLOCKS": _BLOCKS},
        )  # fmt: skip
    return out


@triton.jit
def _squares_kernel(tensor_of_ptr, grid_ptr, address_ptr, partial_ptr, ALIGNED: tl.constexpr, BLOCKS: tl.constexpr):
    tile = tl.program_id(0)
    tensor = tl.load(tensor_of_ptr + tile // GROUP)
    grid = grid_ptr + tensor * 4
    cols, per_row, total = tl.load(grid + 1), tl.load(grid + 2), tl.load(grid + 3)
    data = tl.load(address_ptr + tensor * 2).to(tl.pointer_type(tl.float8e4nv))
    exponents = tl.load(address_ptr + tensor * 2 + 1).to(tl.pointer_type(tl.uint8))
    if ALIGNED:
        data = tl.multiple_of(data, 16)
    block, inside, _, _, offset = tile_at((tile - tl.load(grid)) * BLOCKS, cols, per_row, total, ALIGNED, BLOCKS)
    x = tl.load(data + offset, mask=inside, other=0.0).to(tl.float32)
    exponent = tl.load(exponents + block, mask=block < total, other=127).to(tl.int32)
    scale = power_of_two(exponent)
    tl.store(partial_ptr + tile, tl.sum(tl.sum(x * x, axis=1) * scale * scale, axis=0))


@triton.jit(do_not_specialize=["last_tile"])
def _sum_kernel(partial_ptr, grid_ptr, last_tile, factor_ptr, out_ptr, WIDTH: tl.constexpr):
    tensor = tl.program_id(0)
    first = tl.load(grid_ptr + tensor * 4)
    last = last_tile.to(tl.int64)
    if tensor + 1 < tl.num_programs(0):
        last = tl.load(grid_ptr + (tensor + 1) * 4)
    total = tl.zeros((WIDTH,), tl.float32)
    for start in range(first, last, WIDTH):
        at = start + tl.arange(0, WIDTH)
        total += tl.load(partial_ptr + at, mask=at < last, other=0.0)
    factor = tl.load(tl.load(factor_ptr + tensor).to(tl.pointer_type(tl.float32)))
    tl.store(out_ptr + tensor, tl.sqrt(tl.sum(total, axis=0)) * tl.abs(factor))


def norms(gradients: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    """Euclidean norms of stored E4M3 gradients, in two launches and in a fixed order of summation.

    Args:
        gradients: (data, exponent, factor) of each, all on one GPU.

    Returns:
        FP32 scalars.
    """
    device = gradients[0][0].device
    full = [i for i, (data, _, _) in enumerate(gradients) if data.numel()]
    found = torch.zeros(len(gradients), device=device, dtype=torch.float32)
    if full:
        chosen = [gradients[i] for i in full]
        table = tile_table(tuple(data.shape for data, _, _ in chosen), _NORM_BLOCKS, device)
        addresses = PointerTable().get([g[:2] for g in chosen], device)
        factors = PointerTable().get([g[2:] for g in chosen], device)
        partial = torch.empty(table.tiles, device=device, dtype=torch.float32)
        out = found if len(full) == len(gradients) else torch.empty(len(full), device=device, dtype=torch.float32)
        constants: dict[str, Any] = {"BLOCKS": _NORM_BLOCKS, "num_warps": _NORM_WARPS}
        with torch.cuda.device(device):
            _squares_kernel[(table.tiles,)](
                table.tensor_of, table.grid, addresses, partial, ALIGNED=table.aligned, **constants
            )
            _sum_kernel[(len(full),)](partial, table.grid, table.tiles, factors, out, WIDTH=1024)
        if out is not found:
            found[torch.tensor(full, device=device, dtype=torch.int64)] = out
    return list(found.unbind())

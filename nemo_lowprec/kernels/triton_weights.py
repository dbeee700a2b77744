"""Quantizes many weights in one launch, or two, in both orientations. Importing this file needs Triton.

Data and scales have the bits of ``triton_cast.quantize``; with a scale for 128x128 elements ("squares") they have the
bits of ``triton_tiles.quantize``. With a scale for each row, and for each column, they have those of
``triton_rows.quantize``, and another launch finds the amaxes before.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from nemo_lowprec.formats.floats import E4M3
from nemo_lowprec.kernels.multi_tensor import PointerTable
from nemo_lowprec.kernels.triton_cast import TYPES
from nemo_lowprec.kernels.triton_rows import raise_amaxes
from nemo_lowprec.kernels.triton_tiles import BLOCK, exponent_of, power_of

_TILE_ROWS, _TILE_COLS, _WARPS = 64, 128, 4

# (weight [rows, cols], scale, scale_inv, rowwise data [rows, cols], columnwise data [cols, rows]); with squares, and
# with a scale for each row, the second and the third tensor are 1 / scale of the rowwise and of the columnwise data.
Job = tuple[Tensor, Tensor | None, Tensor, Tensor | None, Tensor | None]


@triton.jit
def _weights_kernel(
    tensor_of_ptr, grid_ptr, address_ptr, SOURCE: tl.constexpr, SCALED: tl.constexpr, ROWWISE: tl.constexpr,
    COLUMNWISE: tl.constexpr, ALIGNED: tl.constexpr, SQUARES: tl.constexpr, FP8_MAX: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr,
):  # fmt: skip
    """Quantize a tile of one weight. ``grid``: int32 [tensors, 4], first tile, rows, columns, stride of ``col``."""
    pid = tl.program_id(0)
    tensor = tl.load(tensor_of_ptr + pid)
    grid = grid_ptr + tensor * 4
    tile, rows, cols, col_stride = pid - tl.load(grid), tl.load(grid + 1), tl.load(grid + 2), tl.load(grid + 3)
    row_of_addresses = address_ptr + tensor * 5
    source = tl.load(row_of_addresses).to(tl.pointer_type(SOURCE))
    row = tl.load(row_of_addresses + 3).to(tl.pointer_type(tl.float8e4nv))
    col = tl.load(row_of_addresses + 4).to(tl.pointer_type(tl.float8e4nv))
    if ALIGNED:
        source, row, col = tl.multiple_of(source, 16), tl.multiple_of(row, 16), tl.multiple_of(col, 16)
        rows, cols, col_stride = tl.multiple_of(rows, 16), tl.multiple_of(cols, 16), tl.multiple_of(col_stride, 16)
    tiles_n = tl.cdiv(cols, BN)
    m = (tile // tiles_n).to(tl.int64) * BM + tl.arange(0, BM)
    n = (tile % tiles_n).to(tl.int64) * BN + tl.arange(0, BN)
    inside = (m < rows)[:, None] & (n < cols)[None, :]
    x = tl.load(source + m[:, None] * cols + n[None, :], mask=inside, other=0.0)
    if SQUARES:  # a tile is one
        x = x.to(tl.float32)
        exponent = exponent_of(tl.max(tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=1), axis=0), FP8_MAX)
        q = (x * power_of(exponent)).to(tl.float8e4nv)
        down, across = tile // tiles_n, tile % tiles_n
        row_scales = tl.load(row_of_addresses + 1).to(tl.pointer_type(tl.float32))
        col_scales = tl.load(row_of_addresses + 2).to(tl.pointer_type(tl.float32))
        tl.store(row_scales + down * (tl.cdiv(tiles_n, 4) * 4) + across, power_of(-exponent))
        tl.store(col_scales + across * (tl.cdiv(tl.cdiv(rows, BM), 4) * 4) + down, power_of(-exponent))
    elif SCALED:
        scale = tl.load(tl.load(row_of_addresses + 1).to(tl.pointer_type(tl.float32)))
        if tile == 0:
            scale_inv = tl.load(row_of_addresses + 2).to(tl.pointer_type(tl.float32))
            tl.store(scale_inv, tl.div_rn(tl.full((), 1.0, tl.float32), scale))
        q = (x.to(tl.float32) * scale).to(tl.float8e4nv)  # which saturates
    else:
        q = x
    if ROWWISE:
        tl.store(row + m[:, None] * cols + n[None, :], q, mask=inside)
    if COLUMNWISE and SQUARES:  # as in ``triton_tiles``
        tl.store(col + n[None, :] * col_stride + m[:, None], q, mask=inside)
    elif COLUMNWISE:
        flipped = (n < cols)[:, None] & (m < rows)[None, :]
        tl.store(col + n[:, None] * col_stride + m[None, :], tl.trans(q), mask=flipped)


@triton.jit
def _rows_kernel(
    tensor_of_ptr, grid_ptr, address_ptr, amax_ptr, SOURCE: tl.constexpr, MEASURES: tl.constexpr,
    ALIGNED: tl.constexpr, FP8_MAX: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Raise the amaxes of the rows and columns of a tile of one weight, or quantize the tile with them.

    ``grid``: int32 [tensors, 4], first tile, rows, columns, place of the first amax. ``amax``: int32, bits of FP32
    numbers, of each weight for its rows and then for its columns.
    """
    pid = tl.program_id(0)
    tensor = tl.load(tensor_of_ptr + pid)
    grid = grid_ptr + tensor * 4
    tile, rows, cols = pid - tl.load(grid), tl.load(grid + 1), tl.load(grid + 2)
    row_amax = amax_ptr + tl.load(grid + 3)
    row_of_addresses = address_ptr + tensor * 5
    source = tl.load(row_of_addresses).to(tl.pointer_type(SOURCE))
    row = tl.load(row_of_addresses + 3).to(tl.pointer_type(tl.float8e4nv))
    col = tl.load(row_of_addresses + 4).to(tl.pointer_type(tl.float8e4nv))
    if ALIGNED:
        source, row, col = tl.multiple_of(source, 16), tl.multiple_of(row, 16), tl.multiple_of(col, 16)
        rows, cols = tl.multiple_of(rows, 16), tl.multiple_of(cols, 16)
    col_amax = row_amax + rows
    tiles_n = tl.cdiv(cols, SIZE)
    down, across = tile // tiles_n, tile % tiles_n
    m = down.to(tl.int64) * SIZE + tl.arange(0, SIZE)
    n = across.to(tl.int64) * SIZE + tl.arange(0, SIZE)
    inside = (m < rows)[:, None] & (n < cols)[None, :]
    x = tl.load(source + m[:, None] * cols + n[None, :], mask=inside, other=0.0).to(tl.float32)
    if MEASURES:
        bits = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
        raise_amaxes(row_amax, m, tl.max(bits, axis=1), m < rows)
        raise_amaxes(col_amax, n, tl.max(bits, axis=0), n < cols)
    else:
        exponent = exponent_of(tl.load(row_amax + m, mask=m < rows, other=0), FP8_MAX)
        q = (x * power_of(exponent)[:, None]).to(tl.float8e4nv)
        tl.store(row + m[:, None] * cols + n[None, :], q, mask=inside)
        if across == 0:
            scales = tl.load(row_of_addresses + 1).to(tl.pointer_type(tl.float32))
            tl.store(scales + m, power_of(-exponent), mask=m < rows)
        exponent = exponent_of(tl.load(col_amax + n, mask=n < cols, other=0), FP8_MAX)
        q = (x * power_of(exponent)[None, :]).to(tl.float8e4nv)
        tl.store(col + n[None, :] * rows + m[:, None], q, mask=inside)
        if down == 0:
            scales = tl.load(row_of_addresses + 2).to(tl.pointer_type(tl.float32))
            tl.store(scales + n, power_of(-exponent), mask=n < cols)


class _Tables:
    """The tables on the device for weights of one kind, which stay from step to step."""

    def __init__(self) -> None:
        self._made_for: Any = None
        self.pointers = PointerTable()

    def fit(self, shapes: list[tuple[int, ...]], device: torch.device, tile_rows: int) -> None:
        if self._made_for == (shapes, device):
            return
        self._made_for = None  # until all tables are there: an allocation may fail
        grid, counts, first = [], [], 0
        for rows, cols, stride in shapes:
            grid.append((first, rows, cols, stride))
            counts.append(-(-rows // tile_rows) * -(-cols // _TILE_COLS))
            first += counts[-1]
        self.tiles = first
        self.aligned = all(side % 16 == 0 for shape in shapes for side in shape)
        self.grid = torch.tensor(grid, dtype=torch.int32).to(device)
        index = torch.arange(len(counts), dtype=torch.int32)
        self.tensor_of = index.repeat_interleave(torch.tensor(counts, dtype=torch.int64)).to(device)
        self._made_for = shapes, device


class WeightCast:
    """Quantizes weights to E4M3, step after step. Its tables are made anew where the weights are others."""

    def __init__(self) -> None:
        self._tables: dict[Any, _Tables] = defaultdict(_Tables)
        self._made: Any = None
        self._launches: list[Callable[[], Any]] = []

    @torch.no_grad()
    def cast(self, jobs: Sequence[Job], numbers: Sequence[int] | None = None) -> None:
        """Quantize weights, without waiting for the device.

        Args:
            jobs: (weight, scale, scale_inv, row, col) of each. The weight is contiguous, [rows, cols], on a GPU, FP32,
                half or E4M3, and not empty. ``scale`` is FP32 [1]; None for a weight in E4M3, which is transposed only.
                The rest is written: ``scale_inv`` FP32 [1], ``row`` E4M3 [rows, cols], contiguous, and ``col`` E4M3
                [cols, rows], contiguous within a row; None for an orientation that is not wanted. A job with squares
                is (weight, 1 / scale of ``row``, 1 / scale of ``col``, row, col); the scales are FP32 and of
                ``scales_shape``, and all tensors but the weight are written. So is a job with a scale for each row,
                whose scales are [rows, 1] and [cols, 1], and whose ``col`` is contiguous.
            numbers: of the jobs. Jobs with the numbers of the call before have the same tensors, in the same places.
        """
        if numbers is None or numbers != self._made:
            self._made = None
            kinds: dict[Any, list[Job]] = defaultdict(list)
            temporary = False
            for job in jobs:
                weight, scale, scale_inv, row, col = job
                squares = scale is not None and scale.dim() > 1
                if squares and scale is not None and scale.shape[1] == 1:
                    kinds[weight.device, weight.dtype, True, True, None].append(job)
                elif weight.dtype == torch.float32 and col is not None:
                    # Triton 3.6 transposes an 8-bit tile that was loaded as FP32 wrongly: a second launch does it.
                    temporary = temporary or row is None
                    row = torch.empty(weight.shape, dtype=E4M3.dtype, device=weight.device) if row is None else row
                    kind = weight.device, torch.float32, True, False, squares
                    kinds[kind].append((weight, scale, scale_inv, row, None))
                    kinds[weight.device, E4M3.dtype, False, True, False].append((row, None, scale_inv, None, col))
                else:
                    kinds[weight.device, weight.dtype, row is not None, col is not None, squares].append(job)
            ordered = sorted(kinds, key=lambda kind: kind[1] == E4M3.dtype)
            self._launches = [self._launch_of(kind, kinds[kind]) for kind in ordered]
            self._made = None if temporary else numbers
            jobs = [job for kind in ordered for job in kinds[kind]]  # temporary tensors live until all are launched
        for launch in self._launches:
            launch()

    def _launch_of(
        self, kind: tuple[torch.device, torch.dtype, bool, bool, bool | None], jobs: list[Job]
    ) -> Callable[[], Any]:
        device, dtype, rowwise, columnwise, squares = kind  # ``squares`` is None for a scale for each row
        if squares is None:
            return self._launch_of_rows(kind, jobs)
        tile_rows = BLOCK if squares else _TILE_ROWS
        tables = self._tables[kind]
        strides = [job[0].shape[0] if job[4] is None else job[4].stride(0) for job in jobs]
        tables.fit([(*job[0].shape, stride) for job, stride in zip(jobs, strides, strict=True)], device, tile_rows)
        # In the place of what is absent stands the weight's address, which is not read.
        addresses = tables.pointers.get([[job[0] if t is None else t for t in job] for job in jobs], device)
        tensor_of, grid, tiles = tables.tensor_of, tables.grid, tables.tiles
        aligned = tables.aligned and tables.pointers.aligned

        def launch() -> None:
            with torch.cuda.device(device):
                _weights_kernel[(tiles,)](
                    tensor_of, grid, addresses, SOURCE=TYPES[dtype], SCALED=dtype != E4M3.dtype,
                    ROWWISE=rowwise, COLUMNWISE=columnwise, ALIGNED=aligned, SQUARES=squares, FP8_MAX=E4M3.max,
                    BM=tile_rows, BN=_TILE_COLS, num_warps=_WARPS,
                )  # fmt: skip

        return launch

    def _launch_of_rows(self, kind: Any, jobs: list[Job]) -> Callable[[], Any]:
        device, dtype, *_ = kind
        tables = self._tables[kind]
        firsts = [0, *accumulate(sum(job[0].shape) for job in jobs)]
        tables.fit([(*job[0].shape, first) for job, first in zip(jobs, firsts, strict=False)], device, BLOCK)
        addresses = tables.pointers.get([[t for t in job if t is not None] for job in jobs], device)
        tensor_of, grid, tiles = tables.tensor_of, tables.grid, tables.tiles
        aligned = tables.pointers.aligned and all(side % 16 == 0 for job in jobs for side in job[0].shape)

        def launch() -> None:
            with torch.cuda.device(device):
                amaxes = torch.zeros(firsts[-1], dtype=torch.int32, device=device)
                for measures in (True, False):
                    _rows_kernel[(tiles,)](
                        tensor_of, grid, addresses, amaxes, SOURCE=TYPES[dtype], MEASURES=measures, ALIGNED=aligned,
                        FP8_MAX=E4M3.max, SIZE=BLOCK, num_warps=_WARPS,
                    )  # fmt: skip

        return launch

"""Fused kernels that pack, unpack and average FP8 messages, bit for bit as ``comm.wire`` does.

Importing this file needs Triton.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from nemo_lowprec.formats import E4M3
from nemo_lowprec.formats.block_scale_128 import exponent_rule
from nemo_lowprec.kernels.multi_tensor import PointerTable, TileTable
from nemo_lowprec.kernels.triton_blocks import GROUP, block_amax, exponents_of, power_of_two, tile_at, to_stored

_BLOCKS, _WARPS = 8, 1
_COPY_BLOCKS, _COPY_WARPS = 32, 4


@triton.jit
def _wire_copy_kernel(
    tensor_of_ptr, grid_ptr, first_ptr, address_ptr, wire_ptr, chunk,
    PACK: tl.constexpr, ALIGNED: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Copy a tile of one gradient into its messages, or out of them."""
    tile = tl.program_id(0)
    tensor = tl.load(tensor_of_ptr + tile // GROUP)
    grid = grid_ptr + tensor * 4
    cols, per_row, total = tl.load(grid + 1), tl.load(grid + 2), tl.load(grid + 3)
    address = address_ptr + tensor * 3
    data = tl.load(address).to(tl.pointer_type(tl.uint8))
    exponents = tl.load(address + 1).to(tl.pointer_type(tl.uint8))
    if ALIGNED:
        data = tl.multiple_of(data, 16)
    block, inside, _, _, offset = tile_at((tile - tl.load(grid)) * BLOCKS, cols, per_row, total, ALIGNED, BLOCKS)
    lane = tl.arange(0, 128)
    there = block < total
    at = tl.load(first_ptr + tensor) + block
    chunk = chunk.to(tl.int64)
    base = (at // chunk) * (chunk * 129)
    within = at % chunk
    place = (base + within * 128)[:, None] + lane[None, :]
    exponent_place = base + chunk * 128 + within
    if PACK:
        values = tl.load(data + offset, mask=inside, other=0)
        tl.store(wire_ptr + place, values, mask=there[:, None] & (lane >= 0)[None, :])
        tl.store(wire_ptr + exponent_place, tl.load(exponents + block, mask=there, other=0), mask=there)
    else:
        values = tl.load(wire_ptr + place, mask=inside, other=0)
        tl.store(data + offset, values, mask=inside)
        tl.store(exponents + block, tl.load(wire_ptr + exponent_place, mask=there, other=0), mask=there)
        if tl.max(tl.max((values & 0x7F).to(tl.int32), axis=1), axis=0) == 0x7F:  # E4M3's NaN
            tl.store(tl.load(address + 2).to(tl.pointer_type(tl.float32)), 1.0)


@triton.jit(do_not_specialize=["inverse"])
def _wire_mean_kernel(
    received_ptr, own_ptr, out_ptr, chunk, inverse, WORLD: tl.constexpr, OWN: tl.constexpr, TOP: tl.constexpr,
    MANTISSA: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
    lane = tl.arange(0, 128)
    chunk = chunk.to(tl.int64)
    place = block[:, None] * 128 + lane[None, :]
    total = tl.zeros((BLOCKS, 128), tl.float32)
    for source in tl.static_range(WORLD):
        base = own_ptr if source == OWN else received_ptr + source * (chunk * 129)
        data = tl.load(base.to(tl.pointer_type(tl.float8e4nv)) + place).to(tl.float32)
        exponent = tl.load(base + chunk * 128 + block).to(tl.int32)
        total += data * power_of_two(exponent)[:, None]
    mean = total * inverse
    exponent = exponents_of(block_amax(mean), TOP, MANTISSA)
    stored = to_stored(mean, exponent, tl.float8e4nv)
    tl.store(out_ptr.to(tl.pointer_type(tl.float8e4nv)) + place, stored)
    tl.store(out_ptr + chunk * 128 + block, exponent.to(tl.uint8))


class FusedPacker:
    """``comm.wire.Packer`` in one launch each way, for a ``comm.wire.Messages`` layout."""

    def __init__(self, layout: Any, device: torch.device) -> None:
        self._layout = layout
        self._full = [i for i, shape in enumerate(layout.shapes) if shape.numel()]
        if not self._full:
            return
        self._tiles = TileTable([layout.shapes[i] for i in self._full], _COPY_BLOCKS, device)
        self._first = torch.tensor([layout.first[i] for i in self._full], dtype=torch.int64).to(device)
        self._pointers = PointerTable()

    def pack(self, rows: Sequence[tuple[Tensor, Tensor, Tensor]], messages: Tensor) -> None:
        self._copy(rows, messages, packs=True)

    def unpack(self, messages: Tensor, rows: Sequence[tuple[Tensor, Tensor, Tensor]]) -> None:
        self._copy(rows, messages, packs=False)

    def _copy(self, rows: Sequence[tuple[Tensor, Tensor, Tensor]], messages: Tensor, packs: bool) -> None:
        if not self._full:
            return
        device = messages.device
        addresses = self._pointers.get([rows[i] for i in self._full], device)
        with torch.cuda.device(device):
            _wire_copy_kernel[(self._tiles.tiles,)](
                self._tiles.tensor_of, self._tiles.grid, self._first, addresses, messages, self._layout.chunk,
                PACK=packs, ALIGNED=self._tiles.aligned and self._pointers.aligned, BLOCKS=_COPY_BLOCKS,
                num_warps=_COPY_WARPS,
            )  # fmt: skip


def mean(received: Tensor, layout: Any, out: Tensor, own: tuple[int, Tensor] | None) -> None:
    """Fill ``out``, uint8 [bytes], with the mean of messages [world, bytes]; see ``wire.mean_of_messages``."""
    top, mantissa = exponent_rule(E4M3)
    index, message = own or (-1, received)
    assert layout.chunk % _BLOCKS == 0 and received.is_contiguous() and message.is_contiguous() and out.is_contiguous()
    with torch.cuda.device(received.device):
        _wire_mean_kernel[(layout.chunk // _BLOCKS,)](
            received, message, out, layout.chunk, 1.0 / layout.world, WORLD=layout.world, OWN=index, TOP=top,
            MANTISSA=mantissa, BLOCKS=_BLOCKS, num_warps=_WARPS, enable_fp_fusion=False,
        )  # fmt: skip

"""Work tables for kernels that go over many tensors in one launch.

Tensors are cut into tiles of whole blocks (``block_scale_128``). A program of the kernel looks up its tile's tensor
and the address of that tensor.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from functools import lru_cache

import torch
from torch import Tensor

from nemo_lowprec.compat.capture import is_capturing
from nemo_lowprec.formats.block_scale_128 import block_grid

TILES = 16  # tiles per entry of the table of tensors, which a program waits for before it reads anything else


class TileTable:
    """How some tensors are cut into tiles.

    Args:
        shapes: of the tensors; none empty.
        blocks: blocks of a tile.
        device: where the kernel runs.

    Attributes:
        tiles: number of tiles, a multiple of ``TILES`` for each tensor; tiles beyond a tensor's end are empty.
        tensor_of: int32 [tiles / TILES], index of the tensor.
        grid: int64 [tensors, 4]: first tile, elements of a row, blocks of a row, blocks.
        aligned: whether every row is a whole number of blocks, so that a tensor's blocks are contiguous.
    """

    def __init__(self, shapes: Sequence[torch.Size], blocks: int, device: torch.device) -> None:
        grid, counts, first = [], [], 0
        self.aligned = True
        for shape in shapes:
            rows, cols, per_row = block_grid(shape)
            total = rows * per_row
            grid.append((first, cols, per_row, total))
            counts.append(-(-total // (blocks * TILES)))
            first += counts[-1] * TILES
            self.aligned &= cols % 128 == 0
        self.tiles = first
        self.grid = torch.tensor(grid, dtype=torch.int64).to(device)
        index = torch.arange(len(counts), dtype=torch.int32)
        self.tensor_of = index.repeat_interleave(torch.tensor(counts, dtype=torch.int64)).to(device)


@lru_cache(maxsize=64)
def tile_table(shapes: tuple[torch.Size, ...], blocks: int, device: torch.device) -> TileTable:
    """The ``TileTable`` of these arguments, uploaded once: the host waits for an upload."""
    return TileTable(shapes, blocks, device)


class PointerTable:
    """Addresses of tensors, on the device. They are uploaded where one has changed; the host does not wait.

    Attributes:
        aligned: whether all addresses but those of scalars are multiples of 16, so that kernels may read 16 bytes.
    """

    def __init__(self) -> None:
        self.aligned = True
        self._addresses: list[int] = []
        self._tables: list[Tensor] = []

    def get(self, rows: Sequence[Sequence[Tensor]], device: torch.device) -> Tensor:
        """The addresses of the tensors in ``rows``: int64 [rows, tensors of a row]."""
        addresses = [t.data_ptr() for row in rows for t in row]
        large = (t.data_ptr() for row in rows for t in row if t.numel() > 1 and t.dtype != torch.uint8)
        return self.upload(addresses, len(rows), device, large)

    def upload(self, addresses: list[int], rows: int, device: torch.device, large: Iterable[int]) -> Tensor:
        """The table of ``addresses``: int64 [rows, addresses of a row].

        Args:
            large: those addresses that ``aligned`` is about; looked at only where an address has changed.
        """
        if addresses != self._addresses:
            # A third of the host time of torch.tensor.
            host = torch.frombuffer(array("q", addresses), dtype=torch.int64).view(rows, -1).pin_memory()
            table = host.to(device, non_blocking=True)
            # A CUDA graph copies from the pinned memory whenever it is replayed: tables made in a capture are kept.
            captured = is_capturing()
            self._tables = [*self._tables, host, table] if captured else [host, table]
            self._addresses = addresses
            self.aligned = not any(address % 16 for address in large)
        return self._tables[-1]

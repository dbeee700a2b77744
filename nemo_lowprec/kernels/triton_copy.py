"""Copies many FP32 tensors into half tensors in one launch, and measures the amax of each copy.

Importing this file needs Triton.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from nemo_lowprec.kernels.multi_tensor import PointerTable, TileTable
from nemo_lowprec.kernels.triton_blocks import GROUP
from nemo_lowprec.kernels.triton_cast import TYPES, raise_amax

_BLOCKS, _WARPS = 16, 4


@triton.jit
def _copy_kernel(
    tensor_of_ptr, grid_ptr, address_ptr, amax_ptr, HALF: tl.constexpr, ALIGNED: tl.constexpr, BLOCKS: tl.constexpr
):
    """Round a tile of one tensor to HALF; ``amax_ptr`` points to the bits of FP32 numbers, one a tensor."""
    tile = tl.program_id(0)
    tensor = tl.load(tensor_of_ptr + tile // GROUP)
    grid = grid_ptr + tensor * 4
    elements, total = tl.load(grid + 1), tl.load(grid + 3)
    source = tl.load(address_ptr + tensor * 2).to(tl.pointer_type(tl.float32))
    target = tl.load(address_ptr + tensor * 2 + 1).to(tl.pointer_type(HALF))
    first = (tile - tl.load(grid)) * BLOCKS
    block = tl.arange(0, BLOCKS)
    lane = tl.arange(0, 128)
    # A condition on whole blocks leaves 16 bytes at once readable.
    inside = (block < total - first)[:, None] & (lane >= 0)[None, :]
    offset = first * 128 + (block[:, None] * 128 + lane[None, :])
    if ALIGNED:
        source, target = tl.multiple_of(source, 16), tl.multiple_of(target, 16)
    else:
        inside = inside & (offset < elements)
    half = tl.load(source + offset, mask=inside, other=0.0).to(HALF)
    tl.store(target + offset, half, mask=inside)
    raise_amax(amax_ptr + tensor, half.to(tl.float32))


class FusedCopy:
    """Copies the same tensors at every step. Its tables are made anew when the tensors are others."""

    def __init__(self) -> None:
        self._made_for: Any = None
        self._pointers = PointerTable()
        self._tiles: TileTable | None = None

    def copy(self, sources: Sequence[Tensor], targets: Sequence[Tensor]) -> Tensor:
        """Round each of ``sources`` into one of ``targets``, as ``Tensor.copy_`` does.

        Args:
            sources: FP32 CUDA tensors of one device; contiguous, and none empty.
            targets: BF16 or FP16 tensors of the same shapes, all of one dtype; contiguous.

        Returns:
            FP32 [tensors]: largest magnitude of each target; NaN where an element is NaN.
        """
        device, half = targets[0].device, targets[0].dtype
        wanted = device, [target.numel() for target in targets]
        if self._tiles is None or wanted != self._made_for:
            self._made_for, self._tiles = wanted, TileTable([torch.Size([n]) for n in wanted[1]], _BLOCKS, device)
        addresses = self._pointers.get(list(zip(sources, targets, strict=True)), device)
        amax = torch.zeros(len(targets), dtype=torch.int32, device=device)
        with torch.cuda.device(device):
            _copy_kernel[(self._tiles.tiles,)](
                self._tiles.tensor_of, self._tiles.grid, addresses, amax, HALF=TYPES[half],
                ALIGNED=self._tiles.aligned and self._pointers.aligned, BLOCKS=_BLOCKS, num_warps=_WARPS,
            )  # fmt: skip
        torch.autograd.graph.increment_version(list(targets))
        return amax.view(torch.float32)

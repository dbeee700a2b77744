"""Some rows of many tensors as one matrix, read in a few launches.

Of a parameter with more than ``most`` elements a part is read: rows that lie evenly over the first dimension, each from
its beginning, in whole blocks of 128 elements. Tensors in blocks are decoded, so that all formats read as FP32.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from nemo_lowprec.formats import decode
from nemo_lowprec.formats.block_scale_128 import BLOCK, block_grid, power
from nemo_lowprec.kernels.loader import sample_kernels
from nemo_lowprec.tensors import BlockScaledTensor, Fp8Weight, GradientTensor, stored_data

_MOST = 8192  # elements of a parameter
_ALL = 2**24  # elements of all parameters, of which many have fewer


class Sampler:
    """Reads the sampled elements of tensors that have the shapes of some parameters.

    Args:
        shapes: of the parameters; of a sharded model, of this process's shards.
        device: of the tensors.

    Attributes:
        width: elements of the longest sample.
    """

    def __init__(self, shapes: Sequence[torch.Size], device: torch.device) -> None:
        most = max(BLOCK, min(_MOST, _ALL // max(1, len(shapes)) // BLOCK * BLOCK))
        self._device = device
        self._cuts = [_Cut(shape, most) for shape in shapes]
        self.width = max((cut.elements for cut in self._cuts), default=0)
        self._indices: dict[tuple[str, tuple[int, ...]], Tensor] = {}
        self._readers: dict[Any, Any] = {}  # kernels, by the role, the format and the members of a group

    def read(self, tensors: Sequence[Tensor | None], role: str = "") -> Tensor:
        """The sampled values, FP32 [parameters, width]; zeros behind a shorter sample, and for None.

        Args:
            tensors: one for each parameter.
            role: of these tensors. Their addresses stay on the GPU until another read of the role has others.
        """
        out = torch.zeros(len(self._cuts), self.width, device=self._device, dtype=torch.float32)
        for kind, group in self._by_format(tensors).items():
            members = tuple(group.members)
            if not self._read_by_kernel((role, kind, members), group, out):
                out.view(-1).index_copy_(0, self._index("place", members), self._values(group.tensors, members))
        return out

    def _by_format(self, tensors: Sequence[Tensor | None]) -> dict[Any, _Group]:
        """The tensors that are stored alike, by a key; empty ones and None are in no group."""
        groups: dict[Any, _Group] = {}
        for i, (tensor, cut) in enumerate(zip(tensors, self._cuts, strict=True)):
            if tensor is None or not cut.elements:
                continue
            data = stored_data(tensor)
            kind = type(tensor), data.dtype
            group = groups.get(kind)
            if group is None:
                group = groups[kind] = _Group()
            group.members.append(i)
            group.tensors.append(tensor)
            group.data.append(data)
        return groups

    def _read_by_kernel(self, key: Any, group: _Group, out: Tensor) -> bool:
        """Read tensors of one format in one launch; whether there is a kernel that reads them."""
        kernels = sample_kernels() if out.is_cuda else None
        if kernels is None or not all([one.is_contiguous() for one in group.data]):
            return False
        reader = self._readers.get(key)
        if reader is None:
            cuts = [(i, *self._cuts[i].strides()) for i in group.members]
            reader = self._readers[key] = kernels.SampleReader(cuts, out.device)
        tensors = group.tensors
        blocked, scaled = isinstance(tensors[0], BlockScaledTensor), isinstance(tensors[0], (Fp8Weight, GradientTensor))
        factors = [t.scale_inv if isinstance(t, Fp8Weight) else t.factor for t in tensors] if scaled else None
        reader.read(group.data, [t.exponent for t in tensors] if blocked else None, factors, out)
        return True

    def _values(self, tensors: list[Tensor], members: tuple[int, ...]) -> Tensor:
        """The samples of tensors of one format, one after the other."""
        cuts = [self._cuts[i] for i in members]
        data = decode(torch.cat([cut.of(stored_data(t)) for cut, t in zip(cuts, tensors, strict=True)]))
        if isinstance(tensors[0], BlockScaledTensor):
            pairs = zip(cuts, tensors, strict=True)
            exponents = torch.cat([cut.of_blocks(t.exponent) for cut, t in pairs])  # type: ignore[attr-defined]
            data *= power(exponents)[self._index("block", members)]
        factors = [_factor(tensor) for tensor in tensors]
        if any(factor is not None for factor in factors):
            one = torch.ones(1, device=self._device, dtype=torch.float32)
            found = torch.cat([one if factor is None else factor.view(1) for factor in factors])
            data *= found[self._index("tensor", members)]
        return data

    def _index(self, of: str, members: tuple[int, ...]) -> Tensor:
        """For each sampled element of ``members`` its place in the result, or the index of its block or tensor."""
        if (of, members) not in self._indices:
            cuts = [self._cuts[i] for i in members]
            found, first = [], 0
            for at, (i, cut) in enumerate(zip(members, cuts, strict=True)):
                if of == "block":
                    row = torch.arange(cut.cols) // BLOCK
                    found.append((torch.arange(cut.rows)[:, None] * cut.blocks + row + first).flatten())
                    first += cut.rows * cut.blocks
                elif of == "tensor":
                    found.append(torch.full((cut.elements,), at, dtype=torch.int64))
                else:
                    found.append(torch.arange(cut.elements) + i * self.width)
            self._indices[of, members] = torch.cat(found).to(self._device)
        return self._indices[of, members]


class _Group:
    """Tensors of one format.

    Attributes:
        members: indices of the tensors.
        tensors: as they were given.
        data: the tensors that hold their elements, as ``stored_data`` has them.
    """

    def __init__(self) -> None:
        self.members: list[int] = []
        self.tensors: list[Any] = []
        self.data: list[Tensor] = []


class _Cut:
    """The sampled rows of a tensor of one shape.

    Attributes:
        rows, cols: of the sample.
        blocks: blocks of a sampled row.
    """

    def __init__(self, shape: torch.Size, most: int) -> None:
        self._grid = rows, cols, _ = block_grid(shape)
        self.cols = cols if cols <= min(most, BLOCK) else min(most, cols // BLOCK * BLOCK)
        self.rows = min(rows, max(1, most // self.cols)) if self.cols else 0
        self.blocks = -(-self.cols // BLOCK)
        self._step = rows // self.rows if self.rows else 1
        self.elements = self.rows * self.cols

    def strides(self) -> tuple[int, int, int, int]:
        """Elements and columns of the sample, and the distances of its rows in the data and in the exponents."""
        _, cols, blocks = self._grid
        return self.elements, self.cols, self._step * cols, self._step * blocks

    def of(self, data: Tensor) -> Tensor:
        """The sampled elements of a tensor of the shape, flat."""
        rows, cols, _ = self._grid
        return data.detach().reshape(rows, cols)[:: self._step][: self.rows, : self.cols].reshape(-1)

    def of_blocks(self, exponent: Tensor) -> Tensor:
        """The exponents [rows, blocks of a row] of the sampled blocks, flat."""
        return exponent[:: self._step][: self.rows, : self.blocks].reshape(-1)


def _factor(tensor: Tensor) -> Tensor | None:
    """The number [1] by which all stored values of ``tensor`` are multiplied; None for 1."""
    if isinstance(tensor, Fp8Weight):
        return tensor.scale_inv
    return tensor.factor if isinstance(tensor, GradientTensor) and tensor.multiplied else None

"""Stacks of whole matrices that Newton–Schulz works on, made of the parameters, or shards of them, of one process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from nemo_lowprec.optim.reference import Update


def exchange_group(sharded: Any) -> dist.ProcessGroup | None:
    """The processes that hold the rows of one matrix; None where this process holds all of the matrix.

    Args:
        sharded: a DTensor whose first dimension is cut, or None. A stack of matrices is cut between its matrices.
    """
    if sharded is None or sharded.dim() > 2:
        return None
    mesh = sharded.device_mesh
    group: dist.ProcessGroup = mesh.get_group(mesh.ndim - 1)
    return group if group.size() > 1 else None


class WholeMatrices:
    """Matrices of one shape between the two halves of Muon's step, in BF16.

    With a process group, each process gets as many of the matrices as the others, as a whole; rows and matrices that
    are missing are zeros.

    Args:
        updates: of parameters [rows, columns] or [matrices, rows, columns], or of their shards.
        shape: [rows, columns] of a whole matrix.
        group: the processes that hold the rows; all have ``updates`` in the same order. None for whole matrices.

    Attributes:
        halves: for each parameter of which this process has elements, the update of the momentum, whose ``param`` is a
            place in the stack; and the update of the parameter, whose ``grad`` is the same place.
    """

    def __init__(self, updates: Sequence[Update], shape: torch.Size, group: dist.ProcessGroup | None) -> None:
        self._shape, self._group = shape, group
        device = updates[0].param.device
        places: Sequence[Tensor]
        if group is None:
            updates = [update for update in updates if update.param.numel()]
            counts = [update.param.numel() // shape.numel() for update in updates]
            self._parts = torch.empty(sum(counts), *shape, dtype=torch.bfloat16, device=device)
            places = self._parts.split(counts) if counts else ()
        else:
            self._each, self._rows = -(-len(updates) // group.size()), -(-shape[0] // group.size())
            size = group.size() * self._each, self._rows, shape[1]
            self._parts = torch.zeros(size, dtype=torch.bfloat16, device=device)
            places = [part[: update.param.shape[0]] for part, update in zip(self._parts, updates, strict=False)]
        self.halves: list[tuple[Update, Update]] = []
        for update, place in zip(updates, places, strict=True):
            if update.param.numel():
                here = place.view(update.param.shape)
                first = replace(update, param=here, second=None, master=None, measures=False)
                self.halves.append((first, replace(update, grad=here, first=None)))

    def gather(self) -> Tensor:
        """The whole matrices of this process: BF16 [matrices, rows, columns], contiguous, to be overwritten."""
        self._stack = self._parts
        if self._group is not None:
            rows, columns = self._shape
            parts = self._exchanged(self._parts).view(-1, self._each, self._rows, columns)
            self._stack = parts.transpose(0, 1).reshape(self._each, -1, columns)[:, :rows].contiguous()
        return self._stack

    def scatter(self) -> None:
        """Bring what was written into the result of ``gather`` back into the halves' places."""
        if self._group is not None:
            world, columns = self._group.size(), self._shape[1]
            padded = self._stack.new_zeros(self._each, world * self._rows, columns)
            padded[:, : self._shape[0]] = self._stack
            parts = padded.view(self._each, world, self._rows, columns).transpose(0, 1)
            self._parts.copy_(self._exchanged(parts.reshape(self._parts.shape)))

    def _exchanged(self, parts: Tensor) -> Tensor:
        """Send the i-th of equal parts to process i; what the processes have sent here."""
        received = torch.empty_like(parts)
        # As bytes: not every backend sends BF16.
        dist.all_to_all_single(received.view(torch.uint8), parts.contiguous().view(torch.uint8), group=self._group)
        return received

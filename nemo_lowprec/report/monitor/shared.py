"""Adds the numbers of all processes up, and brings them to the host without a wait."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from nemo_lowprec.observers import Observers

Name = TypeVar("Name", bound=Hashable)


def is_shared() -> bool:
    """Whether several processes train together."""
    return dist.is_initialized() and dist.get_world_size() > 1


def names_of_all(names: Sequence[Name]) -> list[Name]:
    """The names of all processes, each once: a collective. Processes may have other parts of the model."""
    if not is_shared():
        return list(names)
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, list(names))
    return list(dict.fromkeys(name for each in found for name in each))


class Reading:
    """Sums and maxima of all processes, on their way to the host.

    Args:
        sums: tensors that are added up over the processes; any shapes and dtypes.
        maxima: tensors of which the largest elements are taken.
        observers: are told of the messages.

    Every process makes a reading of tensors of the same shapes at the same time: two collectives.
    """

    def __init__(self, sums: Sequence[Tensor], maxima: Sequence[Tensor], observers: Observers) -> None:
        self._shapes = [t.shape for t in (*sums, *maxima)]
        flat = [torch.cat([t.detach().double().reshape(-1) for t in part]) for part in (sums, maxima)]
        if is_shared():
            for tensor, how in zip(flat, (dist.ReduceOp.SUM, dist.ReduceOp.MAX), strict=True):
                for see in observers.message:
                    see("all_reduce", tensor, 0, "monitor")
                dist.all_reduce(tensor, how)
        together = torch.cat(flat)
        self._event = None
        self._host = together
        if together.is_cuda:
            self._host = torch.empty(together.shape, dtype=together.dtype, pin_memory=True)
            self._host.copy_(together, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()

    def read(self) -> list[Tensor]:
        """The sums and then the maxima on the CPU, in FP64; the host waits until they are there."""
        if self._event is not None:
            self._event.synchronize()
        parts = self._host.split([shape.numel() for shape in self._shapes])
        return [part.view(shape) for part, shape in zip(parts, self._shapes, strict=True)]

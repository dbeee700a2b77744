"""FP8 gradients as messages, which every process sends to every other process.

The blocks of a bucket's gradients, one after the other, are cut into ``world`` messages of ``chunk`` blocks. A message
is ``chunk`` times 128 bytes of E4M3 and then ``chunk`` exponents, so that one exchange carries both. Bytes travel as
uint8, since gloo knows no float8.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from nemo_lowprec.formats import E4M3
from nemo_lowprec.formats.block_scale_128 import BLOCK, block_grid, dequantize_rows, quantize_rows
from nemo_lowprec.kernels.loader import block_kernels
from nemo_lowprec.observers import NOBODY, Observers

Row = tuple[Tensor, Tensor, Tensor]

_ALIGNED = 16  # blocks: messages and their exponents begin at multiples of 16 bytes


@dataclass(frozen=True)
class Messages:
    """The layout of gradients (or of rows of gradients) in messages."""

    shapes: tuple[torch.Size, ...]  # of the gradients
    first: tuple[int, ...]  # index of each gradient's first block, counted over all messages
    chunk: int  # number of blocks in one message
    world: int  # number of messages

    @classmethod
    def in_turn(cls, shapes: Sequence[torch.Size], world: int) -> Messages:
        """Gradients one after the other, for an all-reduce. A message may hold parts of several gradients."""
        *first, total = accumulate(map(blocks_of, shapes), initial=0)
        chunk = max(1, -(-total // (world * _ALIGNED))) * _ALIGNED
        return cls(tuple(shapes), tuple(first), chunk, world)

    @property
    def bytes(self) -> int:
        """Size of one message."""
        return self.chunk * (BLOCK + 1)

    def parts(self, messages: Tensor) -> tuple[Tensor, Tensor]:
        """Views of the data [messages, chunk, 128] and the exponents [messages, chunk] of uint8 [messages, bytes]."""
        data, exponent = messages.split([self.chunk * BLOCK, self.chunk], dim=1)
        return data.unflatten(1, (self.chunk, BLOCK)), exponent


def by_rows(shapes: Sequence[torch.Size], world: int, rank: int) -> tuple[Messages, Messages]:
    """Gradients cut along their first dimension, for a reduce-scatter: message ``i`` holds the rows of process ``i``.

    Returns:
        The layout of all messages, which lists the first process's rows of each gradient, then the second process's,
        and so on, without empty ones; and the layout of the message that process ``rank`` receives.
    """
    counts = [-(-shape[0] // world) for shape in shapes]
    blocks = [blocks_of(torch.Size((count, *shape[1:]))) for shape, count in zip(shapes, counts, strict=True)]
    *first, total = accumulate(blocks, initial=0)
    chunk = max(1, -(-total // _ALIGNED)) * _ALIGNED
    cut: list[list[tuple[torch.Size, int]]] = []
    for process in range(world):
        rows = [max(0, min(c, s[0] - process * c)) for s, c in zip(shapes, counts, strict=True)]
        cut.append([(torch.Size((n, *s[1:])), f) for n, s, f in zip(rows, shapes, first, strict=True) if n])
    placed = [(shape, process * chunk + at) for process, parts in enumerate(cut) for shape, at in parts]
    whole = Messages(tuple(s for s, _ in placed), tuple(f for _, f in placed), chunk, world)
    return whole, Messages(tuple(s for s, _ in cut[rank]), tuple(f for _, f in cut[rank]), chunk, 1)


def blocks_of(shape: torch.Size) -> int:
    """Number of blocks of a gradient of this shape."""
    rows, _, per_row = block_grid(shape)
    return rows * per_row


class Packer:
    """Copies gradients into messages and out of them.

    Gradients are rows of (data, exponents, nonfinite): contiguous E4M3, uint8 and FP32 [1], as in ``GradientTensor``.
    """

    def __init__(self, layout: Messages) -> None:
        self.layout = layout
        self._fused: Any = None

    def pack(self, rows: Sequence[Row], messages: Tensor) -> None:
        """Copy gradients into ``messages``, uint8 [world, bytes]; bytes without a gradient are not written."""
        if fused := self._fused_packer(messages):
            fused.pack(rows, messages)
            return
        data, exponents = self.layout.parts(messages)
        for (stored, exponent, _), place in zip(rows, self._places(messages.device), strict=True):
            tensor_rows, cols, per_row = block_grid(stored.shape)
            padded = F.pad(stored.view(torch.uint8).view(tensor_rows, cols), (0, per_row * BLOCK - cols))
            data[place] = padded.view(-1, BLOCK)
            exponents[place] = exponent.view(-1)

    def unpack(self, messages: Tensor, rows: Sequence[Row]) -> None:
        """Copy messages into gradients, and note gradients that are not finite, besides those noted already."""
        if fused := self._fused_packer(messages):
            fused.unpack(messages, rows)
            return
        data, exponents = self.layout.parts(messages)
        for (stored, exponent, nonfinite), place in zip(rows, self._places(messages.device), strict=True):
            tensor_rows, cols, per_row = block_grid(stored.shape)
            mine = data[place].view(tensor_rows, per_row * BLOCK)[:, :cols]
            stored.view(torch.uint8).copy_(mine.reshape(stored.shape))
            exponent.copy_(exponents[place].view(exponent.shape))
            nonfinite.logical_or_(((mine & 0x7F) == 0x7F).any())  # E4M3's NaN

    def _places(self, device: torch.device) -> Iterator[tuple[Tensor, Tensor]]:
        """For each gradient, (message, block in the message) of each of its blocks."""
        for first, shape in zip(self.layout.first, self.layout.shapes, strict=True):
            block = torch.arange(first, first + blocks_of(shape), device=device)
            yield block // self.layout.chunk, block % self.layout.chunk

    def _fused_packer(self, messages: Tensor) -> Any:
        kernels = _kernels(messages)
        if kernels is not None and self._fused is None:
            self._fused = kernels.FusedPacker(self.layout, messages.device)
        return self._fused


def mean_of_messages(
    received: Tensor,
    layout: Messages,
    out: Tensor,
    own: tuple[int, Tensor] | None = None,
    observers: Observers = NOBODY,
) -> None:
    """Fill ``out``, uint8 [bytes], with the mean of messages [world, bytes], summed in FP32 in their order.

    Args:
        own: (index, uint8 [bytes]), a message that replaces the one of this index in ``received``.
        observers: are told of the mean.
    """
    kernels = _kernels(received)
    if kernels is not None:
        kernels.mean(received, layout, out, own)
    else:
        mean, exponent = quantize_rows(exact_mean(received, layout, own, layout.chunk), E4M3)
        torch.cat([mean.view(torch.uint8).view(-1), exponent.view(-1)], out=out)
    for see in observers.mean:
        see(received, own, layout, out)


def exact_mean(received: Tensor, layout: Messages, own: tuple[int, Tensor] | None, blocks: int) -> Tensor:
    """The mean of the first ``blocks`` blocks of messages (see ``mean_of_messages``) before it is rounded.

    Returns:
        FP32 [blocks, 128].
    """
    data, exponents = (part[:, :blocks] for part in layout.parts(received))
    if own is not None:
        index, message = own
        data, exponents = data.clone(), exponents.clone()
        data[index], exponents[index] = (part[0, :blocks] for part in layout.parts(message.view(1, -1)))
    total = torch.zeros(data.shape[1:], device=received.device, dtype=torch.float32)
    for i in range(layout.world):
        total += dequantize_rows(data[i].view(torch.float8_e4m3fn), exponents[i].reshape(-1, 1))
    return total * (1.0 / layout.world)


def _kernels(tensor: Tensor) -> ModuleType | None:
    return fused_wire() if tensor.is_cuda else None


@lru_cache(maxsize=1)
def fused_wire() -> ModuleType | None:
    """The module of the fused kernels; None without Triton or without a supported GPU."""
    return importlib.import_module("nemo_lowprec.kernels.triton_wire") if block_kernels() is not None else None

"""FP8 gradients as messages: what every process sends to every other one.

The blocks of some gradients, one after the other, are cut into ``world`` messages of ``chunk`` blocks. A message is
``chunk`` times 128 bytes of E4M3 and then ``chunk`` exponents, so that one exchange carries both. Bytes travel as
uint8, since gloo knows no float8.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from types import ModuleType

import torch
import torch.nn.functional as F
from torch import Tensor

from nemo_lowprec.formats import E4M3, GradientTensor
from nemo_lowprec.formats.fused import block_kernels
from nemo_lowprec.formats.row_blocks import BLOCK, block_grid, dequantize_rows, quantize_rows

__all__ = ["Messages", "blocks_of", "fused_wire", "mean_of_messages", "pack", "unpack"]

_ALIGNED = 16  # blocks: messages and their exponents begin at multiples of 16 bytes


@dataclass(frozen=True)
class Messages:
    """Where the blocks of gradients (or of rows of gradients) lie.

    Attributes:
        shapes: of the gradients.
        first: block of each gradient at which it begins.
        chunk: blocks of one message.
        world: number of messages.
    """

    shapes: tuple[torch.Size, ...]
    first: tuple[int, ...]
    chunk: int
    world: int

    @classmethod
    def in_turn(cls, shapes: Sequence[torch.Size], world: int) -> Messages:
        """Gradients one after the other, for an all-reduce: a message may hold parts of several."""
        first, total = [], 0
        for shape in shapes:
            first.append(total)
            total += blocks_of(shape)
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


def blocks_of(shape: torch.Size) -> int:
    """Blocks of a gradient of this shape."""
    rows, _, per_row = block_grid(shape)
    return rows * per_row


def pack(gradients: Sequence[tuple[Tensor, Tensor]], layout: Messages, messages: Tensor) -> None:
    """Fill ``messages``, uint8 [world, bytes], with gradients: contiguous E4M3 data and exponents of each.

    Bytes where no gradient lies stay what they are.
    """
    kernels = _kernels(messages)
    if kernels is not None:
        kernels.pack(gradients, layout, messages)
        return
    data, exponents = layout.parts(messages)
    for (stored, exponent), first in zip(gradients, layout.first, strict=True):
        rows, cols, per_row = block_grid(stored.shape)
        padded = F.pad(stored.view(torch.uint8).view(rows, cols), (0, per_row * BLOCK - cols))
        place = _places(first, rows * per_row, layout, stored.device)
        data[place] = padded.view(-1, BLOCK)
        exponents[place] = exponent.view(-1)


def mean_of_messages(received: Tensor, layout: Messages, out: Tensor) -> None:
    """Fill ``out``, uint8 [bytes], with the mean of messages [world, bytes], summed in FP32 in their order."""
    kernels = _kernels(received)
    if kernels is not None:
        kernels.mean(received, layout, out)
        return
    data, exponents = layout.parts(received)
    total = torch.zeros(layout.chunk, BLOCK, device=received.device)
    for i in range(layout.world):
        total += dequantize_rows(data[i].view(torch.float8_e4m3fn), exponents[i].reshape(-1, 1))
    mean, exponent = quantize_rows(total * (1.0 / layout.world), E4M3)
    torch.cat([mean.view(torch.uint8).view(-1), exponent.view(-1)], out=out)


def unpack(messages: Tensor, gradients: Sequence[GradientTensor], layout: Messages) -> None:
    """Store the values of ``messages``, uint8 [world, bytes], in ``gradients``."""
    kernels = _kernels(messages)
    if kernels is not None:
        kernels.unpack(messages, gradients, layout)
    else:
        data, exponents = layout.parts(messages)
        for gradient, first in zip(gradients, layout.first, strict=True):
            rows, cols, per_row = block_grid(gradient.shape)
            place = _places(first, rows * per_row, layout, messages.device)
            mine = data[place].view(rows, per_row * BLOCK)[:, :cols]
            stored = mine.reshape(gradient.shape).view(torch.float8_e4m3fn)
            gradient.set_blocks_(stored, exponents[place].view(rows, per_row))
            gradient.nonfinite.copy_(((mine & 0x7F) == 0x7F).any())  # E4M3's NaN
    for gradient in gradients:
        gradient.written_()


def _places(first: int, count: int, layout: Messages, device: torch.device) -> tuple[Tensor, Tensor]:
    """(message, block in it) of ``count`` blocks from ``first`` on."""
    block = torch.arange(first, first + count, device=device)
    return block // layout.chunk, block % layout.chunk


def _kernels(tensor: Tensor) -> ModuleType | None:
    return fused_wire() if tensor.is_cuda else None


@lru_cache(maxsize=1)
def fused_wire() -> ModuleType | None:
    """The fused kernels; None without Triton or on a GPU that they do not round right on."""
    return importlib.import_module("nemo_lowprec.comm.triton_wire") if block_kernels() is not None else None

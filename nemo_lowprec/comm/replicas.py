"""Averages a message in FP8 over processes that hold the same part of the gradients, on other machines or in copies."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from nemo_lowprec.comm.exchange import CollectiveBuffers
from nemo_lowprec.comm.topology import second
from nemo_lowprec.comm.wire import Messages, Packer, Row, mean_of_messages
from nemo_lowprec.formats.block_scale_128 import BLOCK
from nemo_lowprec.observers import Observers


class Replicas:
    """An all-reduce of a message's blocks: all_to_all, sum in FP32, quantize, all_gather.

    Args:
        message: the layout in which the message is one.
        group: the processes that average.
        observers: the messages are announced to them.
    """

    def __init__(self, message: Messages, group: dist.ProcessGroup, device: torch.device, observers: Observers) -> None:
        self._message = message
        blocks = torch.Size((message.chunk, BLOCK))
        self._layout = Messages.in_turn([blocks], dist.get_world_size(group))
        self._packer = Packer(self._layout)
        self._buffers = CollectiveBuffers(self._layout, group, second(group), device, observers)
        self._nonfinite = torch.zeros(1, device=device, dtype=torch.float32)

    def _row(self, message: Tensor) -> Row:
        data, exponent = self._message.parts(message.view(1, -1))
        return data[0].view(torch.float8_e4m3fn), exponent[0].view(-1, 1), self._nonfinite

    def launch(self, message: Tensor) -> None:
        """Send the parts of ``message``, uint8 [bytes]."""
        self._packer.pack([self._row(message)], self._buffers.messages())
        self._buffers.exchange()

    def average(self) -> None:
        """Average the parts that have arrived, and send the mean."""
        buffers = self._buffers
        mean_of_messages(buffers.received(), self._layout, buffers.mean(), observers=buffers.observers)
        buffers.gather()

    def complete(self, out: Tensor) -> None:
        """Fill ``out``, uint8 [bytes], with the mean of the messages."""
        self._packer.unpack(self._buffers.gathered(), [self._row(out)])

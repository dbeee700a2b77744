"""Buckets: gradients that are averaged by one exchange, in the format that they have on the wire.

A bucket runs in three stages, so that one's kernels work while another's bytes travel: ``launch`` sends, ``advance``
goes on where there are two exchanges, ``complete`` stores the means. Each only queues work on a GPU.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from nemo_lowprec.comm.exchange import Slot
from nemo_lowprec.comm.wire import Messages, Packer, Row, mean_of_messages
from nemo_lowprec.formats import GradientTensor

__all__ = ["Bucket", "Fp8Bucket", "PlainBucket"]

_IN_PLACE = 2**20  # elements from which a gradient is reduced where it lies, and not in a copy of many


class Bucket(ABC):
    """Parameters whose gradients travel together.

    Args:
        params: of one device, the same on every process.
        group: the processes.
    """

    def __init__(self, params: Sequence[Tensor], group: dist.ProcessGroup | None) -> None:
        self.params = list(params)
        self.group = group
        self.world = dist.get_world_size(group)

    @abstractmethod
    def zeros(self, param: Tensor) -> Tensor:
        """The gradient of a parameter that has none here, and may have one on another process."""

    @abstractmethod
    def launch(self) -> None:
        """Send the gradients that are there; all are."""

    def advance(self) -> None:  # noqa: B027
        """Go on when the first exchange is through; nothing where there is one."""

    @abstractmethod
    def complete(self) -> None:
        """Store the means in the gradients."""


class Fp8Bucket(Bucket):
    """Gradients stored in FP8: all_to_all, sum in FP32, quantize, all_gather; about two bytes an element in all.

    One rounding each way, no patched NCCL, no exchange of amaxes and no headroom factor.

    Attributes:
        layout: of the messages.
        slot: what they travel by; set before the first launch.
    """

    slot: Slot

    def __init__(self, params: Sequence[Tensor], group: dist.ProcessGroup | None) -> None:
        super().__init__(params, group)
        self.layout = Messages.in_turn([p.shape for p in params], self.world)
        self._packer = Packer(self.layout)

    def zeros(self, param: Tensor) -> Tensor:
        return GradientTensor.from_float(torch.zeros(param.shape, device=param.device))

    def _rows(self) -> list[Row]:
        rows = []
        for param in self.params:
            grad = param.grad
            assert grad is not None
            if not isinstance(grad, GradientTensor):  # somebody has put another one there
                param.grad = grad = GradientTensor.from_float(grad)
            grad.fold_()
            rows.append((grad.data_blocks, grad.exponent, grad.nonfinite))
        return rows

    def launch(self) -> None:
        self._packer.pack(self._rows(), self.slot.messages())
        self.slot.exchange()

    def advance(self) -> None:
        mean_of_messages(self.slot.received(), self.layout, self.slot.mean())
        self.slot.gather()

    def complete(self) -> None:
        self._packer.unpack(self.slot.gathered(), self._rows())
        for param in self.params:
            param.grad.written_()  # type: ignore[union-attr]


class PlainBucket(Bucket):
    """Gradients of an ordinary dtype: one all_reduce in that dtype, averaged as it sums.

    Args:
        dtype: of the gradients on the wire.
    """

    def __init__(self, params: Sequence[Tensor], group: dist.ProcessGroup | None, dtype: torch.dtype) -> None:
        super().__init__(params, group)
        self.dtype = dtype
        self._works: list[Any] = []
        self._flat: Tensor | None = None

    def zeros(self, param: Tensor) -> Tensor:
        return torch.zeros(param.shape, dtype=self.dtype, device=param.device)

    def _flattened(self) -> list[Tensor]:
        return [g for p in self.params if (g := p.grad) is not None and not self._alone(g)]

    def _alone(self, grad: Tensor) -> bool:
        return grad.numel() >= _IN_PLACE and grad.is_contiguous() and grad.dtype == self.dtype

    def _all_reduce(self, tensor: Tensor) -> None:
        if dist.get_backend(self.group) == "nccl":
            self._works.append(dist.all_reduce(tensor, dist.ReduceOp.AVG, self.group, async_op=True))
        else:  # before the sum, which FP16 might not hold
            self._works.append(dist.all_reduce(tensor.div_(self.world), group=self.group, async_op=True))

    def launch(self) -> None:
        small = self._flattened()
        if small:
            self._flat = torch.cat([g.detach().reshape(-1).to(self.dtype) for g in small])
            self._all_reduce(self._flat)
        for param in self.params:
            if param.grad is not None and self._alone(param.grad):
                self._all_reduce(param.grad.detach())

    def complete(self) -> None:
        for work in self._works:
            work.wait()
        self._works.clear()
        if self._flat is not None:
            small = self._flattened()
            means = self._flat.split([g.numel() for g in small])
            torch._foreach_copy_(
                [g.detach() for g in small], [m.view(g.shape) for g, m in zip(small, means, strict=True)]
            )
            self._flat = None

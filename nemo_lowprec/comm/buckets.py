"""Buckets: gradients that one exchange averages, in one wire format.

A bucket runs in three stages, so that kernels of one bucket run while another bucket's bytes travel: ``launch`` sends,
``advance`` sums and starts the second exchange where there is one, ``complete`` stores the means. On a GPU each stage
only queues work.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from nemo_lowprec.comm.exchange import CollectiveBuffers, ExchangeBuffers
from nemo_lowprec.comm.wire import Messages, Packer, Row, by_rows, mean_of_messages
from nemo_lowprec.formats.block_scale_128 import BLOCK
from nemo_lowprec.observers import NOBODY, Observers
from nemo_lowprec.tensors import GradientTensor
from nemo_lowprec.tensors.dtensor import as_dtensor_like, local_shard
from nemo_lowprec.tensors.gradient import DETACHED_GRADS

IN_PLACE = 2**20  # elements; larger gradients are reduced in place, smaller ones in one flat copy


class Bucket(ABC):
    """Parameters whose gradients are sent together. The means replace the gradients, unless a subclass says otherwise.

    Args:
        params: of one device, the same on every process.
        group: the processes.
    """

    def __init__(self, params: Sequence[Tensor], group: dist.ProcessGroup | None) -> None:
        self.params = list(params)
        self.group = group
        self.world = dist.get_world_size(group)

    def fill(self, param: Tensor) -> bool:
        """Give a parameter without a gradient zeros, as another process may have one. Returns whether it had none."""
        if param.grad is not None:
            return False
        param.grad = self._zeros(param)
        return True

    def _zeros(self, param: Tensor) -> Tensor:
        return GradientTensor.from_float(torch.zeros(param.shape, device=param.device, dtype=torch.float32))

    def forget(self, param: Tensor) -> None:
        """Remove the mean of a parameter of which no process has a gradient."""
        param.grad = None

    @abstractmethod
    def launch(self) -> None:
        """Send the gradients. All parameters have one."""

    def advance(self) -> None:  # noqa: B027
        """After the first of two exchanges: sum, and start the second. A bucket with one exchange does nothing."""

    @abstractmethod
    def complete(self) -> None:
        """Store the means in the gradients."""


class Fp8Bucket(Bucket):
    """Gradients stored in FP8: all_to_all, sum in FP32, quantize, all_gather; about two bytes an element in all.

    One rounding each way, no patched NCCL, no exchange of amaxes and no headroom factor.
    """

    buffers: ExchangeBuffers  # set before the first launch

    def __init__(self, params: Sequence[Tensor], group: dist.ProcessGroup | None) -> None:
        super().__init__(params, group)
        self.layout = Messages.in_turn([p.shape for p in params], self.world)
        self._packer = Packer(self.layout)

    def _rows(self) -> list[Row]:
        rows = []
        for param in self.params:
            grad = param.grad
            assert grad is not None
            if not isinstance(grad, GradientTensor):  # the user has replaced the gradient
                param.grad = grad = GradientTensor.from_float(grad)
            grad.fold_()
            rows.append((grad.data_blocks, grad.exponent, grad.nonfinite))
        return rows

    def launch(self) -> None:
        self._packer.pack(self._rows(), self.buffers.messages())
        self.buffers.exchange()

    def advance(self) -> None:
        mean_of_messages(
            self.buffers.received(), self.layout, self.buffers.mean(), self.buffers.own(), self.buffers.observers
        )
        self.buffers.gather()

    def complete(self) -> None:
        self._packer.unpack(self.buffers.gathered(), self._rows())
        for param in self.params:
            param.grad.written_()  # type: ignore[union-attr]


class Fp8ShardBucket(Bucket):
    """``DETACHED_GRADS``, taken off and reduced onto shards: all_to_all of rows, sum in FP32, quantize.

    Args:
        params: whole parameters, as FSDP2 gathers them.
        shards: the sharded parameters, in the order of ``params``; their gradients become the means.
        replicas: processes that hold the same shards, over which the means are averaged again; None for none.
        observers: the messages between ``replicas`` are announced to them.
    """

    buffers: ExchangeBuffers  # set before the first launch

    def __init__(
        self, params: Sequence[Tensor], group: dist.ProcessGroup | None, shards: Sequence[Tensor],
        replicas: dist.ProcessGroup | None = None, observers: Observers = NOBODY,
    ) -> None:  # fmt: skip
        super().__init__(params, group)
        self._shards = dict(zip(map(id, params), shards, strict=True))
        self._rows = [-(-p.shape[0] // self.world) for p in params]
        self.layout, own = by_rows([p.shape for p in params], self.world, dist.get_rank(group))
        self._packer, self._unpacker = Packer(self.layout), Packer(own)
        self._replicas = _Replicas(own, replicas, params[0].device, observers) if replicas is not None else None
        self._mean: Tensor | None = None
        self._new: set[int] = set()

    def fill(self, param: Tensor) -> bool:
        if param in DETACHED_GRADS:
            return False
        DETACHED_GRADS.add(param, self._zeros(param))
        return True

    def forget(self, param: Tensor) -> None:
        if id(param) in self._new:  # an earlier pass's gradient stays
            self._shards[id(param)].grad = None

    def launch(self) -> None:
        rows: list[Row] = []
        sent = [DETACHED_GRADS.discard(p).fold_() for p in self.params]
        for rank in range(self.world):
            for gradient, count in zip(sent, self._rows, strict=True):
                part = slice(rank * count, (rank + 1) * count)
                if gradient.shape[0] > rank * count:
                    rows.append((gradient.data_blocks[part], gradient.exponent[part], gradient.nonfinite))
        self._packer.pack(rows, self.buffers.messages())
        self.buffers.exchange()
        for gradient in sent:
            if gradient.is_cuda:  # freed here, while a stream that did not allocate it still reads it
                for part_ in gradient.parts():
                    part_.record_stream(torch.cuda.current_stream(gradient.device))

    def advance(self) -> None:
        self._mean = self.buffers.mean()
        mean_of_messages(self.buffers.received(), self.layout, self._mean, self.buffers.own(), self.buffers.observers)
        if self._replicas is not None:
            self._replicas.launch(self._mean)

    def complete(self) -> None:
        assert self._mean is not None
        if self._replicas is not None:
            self._mean = self._replicas.complete()
        shards = [self._shards[id(p)] for p in self.params]
        means = [GradientTensor.empty(local_shard(shard)) for shard in shards]
        rows = [(m.data_blocks, m.exponent, m.nonfinite) for m in means if m.numel()]
        self._unpacker.unpack(self._mean.view(1, -1), rows)
        self._mean = None
        self.buffers.release()
        self._new = {id(p) for p, shard in zip(self.params, shards, strict=True) if shard.grad is None}
        for shard, mean in zip(shards, means, strict=True):
            if shard.grad is None:
                shard.grad = as_dtensor_like(mean, shard)
            else:
                local_shard(shard.grad).accumulate_(mean.dequantize())


class _Replicas:
    """Averages a message over processes that hold the same shards, by an all-reduce of its blocks in FP8."""

    def __init__(self, message: Messages, group: dist.ProcessGroup, device: torch.device, observers: Observers) -> None:
        self._message = message
        blocks = torch.Size((message.chunk, BLOCK))
        self._layout = Messages.in_turn([blocks], dist.get_world_size(group))
        self._packer = Packer(self._layout)
        self._buffers = CollectiveBuffers(self._layout, group, device, observers)
        self._nonfinite = torch.zeros(1, device=device, dtype=torch.float32)

    def _row(self, message: Tensor) -> Row:
        data, exponent = self._message.parts(message.view(1, -1))
        return data[0].view(torch.float8_e4m3fn), exponent[0].view(-1, 1), self._nonfinite

    def launch(self, mean: Tensor) -> None:
        self._packer.pack([self._row(mean)], self._buffers.messages())
        self._buffers.exchange()

    def complete(self) -> Tensor:
        mean_of_messages(
            self._buffers.received(), self._layout, self._buffers.mean(), observers=self._buffers.observers
        )
        self._buffers.gather()
        gathered = self._buffers.gathered()
        averaged = gathered.new_empty(self._message.bytes)
        self._packer.unpack(gathered, [self._row(averaged)])
        return averaged


class PlainBucket(Bucket):
    """Gradients of an ordinary dtype: one all_reduce in this dtype, which averages.

    Args:
        dtype: of the gradients on the wire.
        observers: the messages are announced to them.
    """

    def __init__(
        self, params: Sequence[Tensor], group: dist.ProcessGroup | None, dtype: torch.dtype,
        observers: Observers = NOBODY,
    ) -> None:  # fmt: skip
        super().__init__(params, group)
        self.dtype, self._observers = dtype, observers
        self._works: list[Any] = []
        self._flat: Tensor | None = None

    def _zeros(self, param: Tensor) -> Tensor:
        return torch.zeros(param.shape, dtype=self.dtype, device=param.device)

    def _gradients(self) -> tuple[list[Tensor], list[Tensor]]:
        """The gradients that are sent in one flat copy, and the gradients that are reduced in place."""
        small: list[Tensor] = []
        large: list[Tensor] = []
        for param in self.params:
            assert param.grad is not None
            grad = param.grad.detach()
            alone = grad.numel() >= IN_PLACE and grad.is_contiguous() and grad.dtype == self.dtype
            (large if alone else small).append(grad)
        return small, large

    def launch(self) -> None:
        small, sent = self._gradients()
        if small:
            self._flat = torch.cat([g.reshape(-1).to(self.dtype) for g in small])
            sent.insert(0, self._flat)
        for tensor in sent:
            for see in self._observers.message:
                see("all_reduce", tensor, 0, "gradient")
            if dist.get_backend(self.group) == "nccl":
                self._works.append(dist.all_reduce(tensor, dist.ReduceOp.AVG, self.group, async_op=True))
            else:  # divided before the sum, which could overflow in FP16
                self._works.append(dist.all_reduce(tensor.div_(self.world), group=self.group, async_op=True))

    def complete(self) -> None:
        for work in self._works:
            work.wait()
        self._works.clear()
        if self._flat is not None:
            small, _ = self._gradients()
            means = self._flat.split([g.numel() for g in small])
            torch._foreach_copy_(small, [m.view(g.shape) for g, m in zip(small, means, strict=True)])
            self._flat = None

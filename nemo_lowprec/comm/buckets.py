"""Buckets: gradients that one exchange averages, in one wire format.

A bucket runs in stages, so that kernels of one bucket run while another bucket's bytes travel: ``launch`` sends,
``advance`` sums and starts the second exchange where there is one, ``complete`` stores the means. Where means are
averaged again, by ``Replicas``, ``average`` comes in between. On a GPU each stage only queues work.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from nemo_lowprec.comm.exchange import ExchangeBuffers
from nemo_lowprec.comm.replicas import Replicas
from nemo_lowprec.comm.topology import backend_of
from nemo_lowprec.comm.wire import Messages, Packer, Row, by_rows, mean_of_messages
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

    _replicas: Replicas | None = None  # averages the means again

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

    @property
    def stages(self) -> tuple[Callable[[], None], ...]:
        """What follows ``launch``: one stage whenever another bucket is sent, the rest after the last bucket."""
        between = () if self._replicas is None else (self._replicas.average,)
        return self.advance, *between, self.complete

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

    With ``across`` all_to_all and all_gather stay within a machine, and in between each process averages its mean with
    its counterparts on the other machines. The mean is rounded twice, once on each level. For any number of processes a
    machine sends and receives about 2 (machines - 1) / machines bytes an element.

    Args:
        group: the processes; with ``across`` those of this machine.
        across: the counterparts of this process, one a machine; None to average over ``group`` alone.
        observers: the messages between machines are announced to them.
    """

    buffers: ExchangeBuffers  # set before the first launch

    def __init__(
        self, params: Sequence[Tensor], group: dist.ProcessGroup | None, across: dist.ProcessGroup | None = None,
        observers: Observers = NOBODY,
    ) -> None:  # fmt: skip
        super().__init__(params, group)
        self.layout = Messages.in_turn([p.shape for p in params], self.world)
        self._packer = Packer(self.layout)
        self._replicas = Replicas(self.layout, across, params[0].device, observers) if across is not None else None
        self._mean: Tensor | None = None

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
        self._mean = self.buffers.mean()
        mean_of_messages(self.buffers.received(), self.layout, self._mean, self.buffers.own(), self.buffers.observers)
        if self._replicas is not None:
            self._replicas.launch(self._mean)
        else:
            self.buffers.gather()

    def complete(self) -> None:
        if self._replicas is not None:
            assert self._mean is not None
            self._replicas.complete(self._mean)
            self.buffers.gather()
        self._mean = None
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
        self._replicas = Replicas(own, replicas, params[0].device, observers) if replicas is not None else None
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
            self._replicas.complete(self._mean)
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
            if backend_of(self.group, tensor.device.type) == "nccl":
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

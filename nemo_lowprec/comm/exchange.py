"""Exchanges messages between all processes, and gathers the means.

``CollectiveBuffers`` uses the process group's collectives, on any device. ``PeerBuffers`` is for GPUs of one machine
that reach each other's memory, where NCCL may use this access, too: copy engines move the messages. This takes no
multiprocessor from the backward pass, and uses the links better than NCCL's kernels do. Each GPU writes to the others,
one message after the other: reading is slower, and concurrent copies take more time in all (measured between four
H200s).
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from types import ModuleType
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from nemo_lowprec.comm.topology import backend_of, machines_by_rank, peer_access_is_off
from nemo_lowprec.comm.wire import Messages
from nemo_lowprec.compat.distributed import all_gather_single, timeout_of
from nemo_lowprec.observers import NOBODY, Observers

_SENT, _RECEIVED, _GATHERED = 2, 4, 3  # slots for each, see PeerMemory
# The barrier waits longer than NCCL's watchdog, whose message names the collective that hangs.
_AFTER_WATCHDOG = timedelta(seconds=10)


class CollectiveBuffers:
    """The buffers of one bucket in flight, which the collectives all_to_all and all_gather exchange.

    On a GPU, all methods only queue work.

    Args:
        group: the processes; its connections carry all_to_all.
        gathers: another group of the same processes, for all_gather: so the means of one bucket travel beside the
            messages of the next. None where nothing is gathered.
    """

    def __init__(
        self, layout: Messages, group: dist.ProcessGroup | None, gathers: dist.ProcessGroup | None,
        device: torch.device, observers: Observers = NOBODY,
    ) -> None:  # fmt: skip
        self._layout, self._group, self._gathers = layout, group, gathers
        self._device, self.observers = device, observers
        self._work: Any = None
        self._sent: Tensor | None = None
        self._received: Tensor | None = None
        self._mean: Tensor | None = None
        self._gathered: Tensor | None = None

    def _empty(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.uint8, device=self._device)

    def messages(self) -> Tensor:
        """uint8 [world, bytes], which the caller fills with this process's messages."""
        self._sent = self._empty(self._layout.world, self._layout.bytes)
        return self._sent

    def exchange(self) -> None:
        """Send message ``i`` to process ``i``, for all ``i``."""
        assert self._sent is not None
        self._received = torch.empty_like(self._sent)
        for see in self.observers.message:
            see("all_to_all", self._sent, 0, "gradient")
        self._work = dist.all_to_all_single(self._received, self._sent, group=self._group, async_op=True)

    def received(self) -> Tensor:
        """uint8 [world, bytes]: the messages to this process, after they have arrived; see ``own``."""
        self._work.wait()
        received, self._received = self._received, None
        self._sent = None  # freed after the wait: the exchange reads it
        assert received is not None
        return received

    def own(self) -> tuple[int, Tensor] | None:
        """(index, uint8 [bytes]) of this process's message to itself, where ``received`` does not contain it."""
        return None

    def mean(self) -> Tensor:
        """uint8 [bytes], which the caller fills with the mean of the messages."""
        self._mean = self._empty(self._layout.bytes)
        return self._mean

    def gather(self) -> None:
        """Send the mean to all processes."""
        assert self._mean is not None and self._gathers is not None
        self._gathered = self._empty(self._layout.world, self._layout.bytes)
        for see in self.observers.message:
            see("all_gather", self._mean, 0, "gradient")
        self._work = all_gather_single(self._gathered.view(-1), self._mean, group=self._gathers, async_op=True)

    def gathered(self) -> Tensor:
        """uint8 [world, bytes]: the means of all processes, after they have arrived."""
        self._work.wait()
        gathered = self._gathered
        self.release()
        assert gathered is not None
        return gathered

    def release(self) -> None:
        """Free the buffers. The result of a reduce-scatter is not gathered, so the caller frees its buffers."""
        self._work = self._sent = self._mean = self._gathered = None


class PeerMemory:
    """Memory for buckets in flight that all processes of a group reach, and a stream for copies.

    Buckets use the slots in turn. At a time, a bucket is sent, the one before is summed and the one before that stored.
    A process that writes into another's slot knows that the slot's earlier bucket was read:

    - Bucket k is sent after k-2 was summed here. So all have packed k-2, and before that have summed k-4.
    - The mean of k is sent after all have packed k, and before that have stored k-3. Where machines average the mean of
      k first (``Fp8Bucket.complete``), the mean of k is sent after k-1 was stored here. So all have sent k-1, and
      before that have stored k-2.
    - Between two backward passes all have summed all: the mean of the last bucket was sent. Where no means are sent,
      an all_reduce comes last (``GradientReducer.finish``).

    Args:
        capacity: bytes of the largest message.
        shared: memory for the slots of received and gathered messages, uint8, which the other processes reach.

    Raises:
        RuntimeError: the GPUs do not reach each other's memory.
    """

    def __init__(self, capacity: int, group: dist.ProcessGroup | None, device: torch.device, shared: Tensor) -> None:
        self.world, self.rank = dist.get_world_size(group), dist.get_rank(group)
        self.capacity, self.device = capacity, device
        self._timeout = int((timeout_of(group, device) + _AFTER_WATCHDOG).total_seconds() * 1000)
        # A high priority: a barrier that waits behind other kernels holds up all processes. Between two GPUs copies go
        # on during a barrier. Between more GPUs they wait, so that each GPU has one source and one target at a time.
        self.copies = torch.cuda.Stream(device, priority=-2)
        self.barriers = torch.cuda.Stream(device, priority=-2) if self.world == 2 else self.copies
        size, slots = self.world * capacity, _RECEIVED + _GATHERED
        self._shared = shared
        self._handle = _symmetric().rendezvous(shared, group or dist.group.WORLD)
        every = [
            self._handle.get_buffer(rank, (slots, size), torch.uint8) if rank != self.rank
            else self._shared.view(slots, size)
            for rank in range(self.world)
        ]  # fmt: skip
        self.received = [buffer[:_RECEIVED] for buffer in every]
        self.gathered = [buffer[_RECEIVED:] for buffer in every]
        self.sent = torch.empty(_SENT, size, dtype=torch.uint8, device=device)

    @staticmethod
    def bytes_for(capacity: int, world: int) -> int:
        """Bytes on each GPU: messages sent, received and gathered, in all slots."""
        return (_SENT + _RECEIVED + _GATHERED) * world * capacity

    def barrier(self) -> None:
        """Wait on the current stream until all processes are here; an error soon after the group's timeout."""
        self._handle.barrier(timeout_ms=self._timeout)

    @classmethod
    def try_for(cls, capacity: int, group: dist.ProcessGroup | None, device: torch.device) -> PeerMemory | None:
        """A ``PeerMemory``; None on all processes where one process cannot have it."""
        world = dist.get_world_size(group)
        if backend_of(group, "cuda") != "nccl" or not 1 < world <= torch.cuda.device_count():
            return None
        if len(set(machines_by_rank(group))) > 1:
            return None
        # The processes compare notes after each step: in the next step, a process would wait for one that has failed.
        size = (_RECEIVED + _GATHERED) * world * capacity

        def allocate() -> Tensor | None:
            return None if peer_access_is_off() else _symmetric().empty(size, dtype=torch.uint8, device=device)

        shared = _on_all(allocate, group, device)
        return None if shared is None else _on_all(lambda: cls(capacity, group, device, shared), group, device)


def _symmetric() -> ModuleType:
    return importlib.import_module("torch.distributed._symmetric_memory")


_T = TypeVar("_T")


def _on_all(make: Callable[[], _T | None], group: dist.ProcessGroup | None, device: torch.device) -> _T | None:
    """The result of ``make``; None on all processes where ``make`` fails or returns None on one process."""
    made: _T | None = None
    with suppress(RuntimeError, ImportError, AttributeError):
        made = make()
    there = torch.tensor(made is not None, dtype=torch.int8, device=device)
    dist.all_reduce(there, dist.ReduceOp.MIN, group)
    return made if bool(there) else None


class PeerBuffers:
    """As ``CollectiveBuffers``, exchanged by copies between the memories of GPUs."""

    def __init__(self, layout: Messages, memory: PeerMemory, index: int, observers: Observers = NOBODY) -> None:
        world, size = layout.world, layout.bytes
        self._memory, self.observers = memory, observers
        view = lambda slots: slots[index % len(slots)][: world * size].view(world, size)  # noqa: E731
        self._sent = view(memory.sent)
        self._received = [view(b) for b in memory.received]
        self._gathered = [view(b) for b in memory.gathered]
        self._event = torch.cuda.Event()
        self._others = [(memory.rank + i) % world for i in range(1, world)]  # each process starts with another target
        self._bytes = size * (world - 1)

    def messages(self) -> Tensor:
        return self._sent

    def exchange(self) -> None:
        me = self._memory.rank
        with self._copying("all_to_all", self._sent):
            for other in self._others:
                self._received[other][me].copy_(self._sent[other], non_blocking=True)

    @contextmanager
    def _copying(self, kind: str, tensor: Tensor) -> Iterator[None]:
        memory = self._memory
        for see in self.observers.message:
            see(kind, tensor, self._bytes, "gradient")
        memory.copies.wait_stream(torch.cuda.current_stream(memory.device))
        with torch.cuda.stream(memory.copies):
            yield
        memory.barriers.wait_stream(memory.copies)
        with torch.cuda.stream(memory.barriers):
            memory.barrier()  # until all have sent
            self._event.record()

    def received(self) -> Tensor:
        self._event.wait()
        return self._received[self._memory.rank]

    def own(self) -> tuple[int, Tensor]:
        return self._memory.rank, self._sent[self._memory.rank]

    def mean(self) -> Tensor:
        return self._gathered[self._memory.rank][self._memory.rank]

    def gather(self) -> None:
        me = self._memory.rank
        with self._copying("all_gather", self._gathered[me][me]):
            for other in self._others:
                self._gathered[other][me].copy_(self._gathered[me][me], non_blocking=True)

    def gathered(self) -> Tensor:
        self._event.wait()
        return self._gathered[self._memory.rank]

    def release(self) -> None:
        pass  # the memory stays


ExchangeBuffers = CollectiveBuffers | PeerBuffers

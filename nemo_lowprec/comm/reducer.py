"""Averages gradients over processes during backward.

Source: bucketing in reverse order and the overlap with backward are from DistributedDataParallel (arXiv:2006.15704).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from nemo_lowprec.comm.bucketing import BUCKET_BYTES, cut_into_buckets
from nemo_lowprec.comm.buckets import Bucket, Fp8Bucket, Fp8ShardBucket, PlainBucket
from nemo_lowprec.comm.exchange import CollectiveBuffers, PeerBuffers, PeerMemory
from nemo_lowprec.comm.topology import Machines, second
from nemo_lowprec.observers import NOBODY, Observers
from nemo_lowprec.tensors.weak_hooks import weakly


class GradientReducer:
    """Replaces the gradient of every parameter by the mean over the processes of a group, equal on all processes.

    A backward pass runs between ``begin`` and ``finish``. A bucket is sent when all gradients of the bucket, and of all
    buckets before it, are computed: so every process sends in the same order. A missing gradient counts as zero where
    another process has a gradient of the parameter; a parameter without a gradient on any process keeps none.

    FP8 gradients of several machines with several processes each are averaged within each machine and then between
    machines (see ``Machines``).

    The first backward pass sends all buckets at its end, and counts how often each gradient is added to: several times
    where reentrant activation checkpointing recomputes a layer that is used more than once. With ``shards`` buckets are
    sent as soon as possible in every pass, since the gradients of the whole model would not fit into memory.

    Args:
        params: the parameters, in the same order on every process. Frozen parameters are left out at ``begin``.
        group: the processes, all of which make the reducer at this point; None for all.
        wire: dtype of a parameter's gradient on the wire, ``float8_e4m3fn`` for a gradient that is stored in FP8.
        bucket_bytes: size of a bucket on the wire.
        shards: makes the bucket of FP8 gradients that are reduced onto shards; None to average in place.
        observers: are told of the messages of all buckets.

    Raises:
        RuntimeError: in backward, a gradient was added to after it had been sent.
    """

    def __init__(
        self,
        params: Iterable[Tensor],
        group: dist.ProcessGroup | None,
        wire: Callable[[Tensor], torch.dtype],
        bucket_bytes: int | None = None,
        shards: Callable[[list[Tensor]], Fp8ShardBucket] | None = None,
        observers: Observers = NOBODY,
    ) -> None:
        self.group, self.observers = group, observers
        self._shards = shards
        self._params = list({id(p): p for p in params}.values())
        self._wire = wire
        self._bucket_bytes = bucket_bytes or BUCKET_BYTES
        in_place = shards is None and any(wire(p) == torch.float8_e4m3fn for p in self._params)
        self._machines = Machines.of(group) if in_place else None
        self._buckets: list[Bucket] = []
        self._most_stages = 0
        self._built_for: list[tuple[int, torch.device]] = []
        self._bucket_of: dict[int, int] = {}
        self._hooks = ExitStack()
        self._expected: dict[int, int] = {}
        self._arrivals: Counter[int] = Counter()
        self._missing: list[int] = []
        self._launched = 0
        self._active = False
        self._made: list[Tensor] = []
        self._all_there: Tensor | None = None
        self._stream: torch.cuda.Stream | None = None
        self._peers: PeerMemory | None = None

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError("A GradientReducer belongs to a process group, and cannot be copied.")

    def averages(self, params: Sequence[Tensor]) -> bool:
        """Whether the reducer was made for ``params``."""
        return [*map(id, self._params)] == [*map(id, params)]

    def begin(self) -> None:
        """Announce a backward pass, whose gradients are to be averaged together with those left by earlier passes."""
        if self._shards is None and dist.get_world_size(self.group) == 1:
            return  # no other process; onto shards, gradients must be put nevertheless
        self._fit()
        self._arrivals.clear()
        self._missing = [len(b.params) for b in self._buckets]
        self._launched = 0
        self._active = True

    @torch.no_grad()
    def finish(self) -> None:
        """Send the remaining buckets, and wait for all means (on a GPU, the current stream waits)."""
        self._active = False
        if not self._buckets:
            return
        while self._launched < len(self._buckets):
            self._launch()
        # With shards this comes last: it tells that all processes have read their ``PeerMemory``.
        there = self._ask_who_has() if self._shards is None else None
        with self._on_side_stream():
            for more in range(self._most_stages):
                self._advance(len(self._buckets) + more)
        if self._stream is not None:
            torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)
        self._forget_unused(*(there or self._ask_who_has()))
        for key in self._bucket_of:
            self._expected[key] = max(self._expected.get(key, 1), self._arrivals[key])

    def abandon(self) -> None:
        """Send no more gradients of a backward pass that has failed."""
        self._active = False
        self._made = []

    def reduce(self) -> None:
        """Average the present gradients."""
        self.begin()
        self.finish()

    def remove(self) -> None:
        """Remove the hooks."""
        self._hooks.close()
        self._built_for = []

    def _fit(self) -> None:
        """Cut the parameters that require a gradient into buckets, in about the order of the backward pass."""
        trained = [p for p in self._params if p.requires_grad]
        wanted = [(id(p), p.device) for p in trained]
        if wanted == self._built_for:
            return
        self.remove()
        self._built_for = wanted
        self._expected = {} if self._shards is None else dict.fromkeys((id(p) for p in trained), 1)
        self._buckets = []
        self._all_there = None
        for wire, params in cut_into_buckets(reversed(trained), self._wire, self._bucket_bytes):
            if wire != torch.float8_e4m3fn:
                self._buckets.append(PlainBucket(params, self.group, wire, self.observers))
            else:
                self._buckets.append(self._in_place(params) if self._shards is None else self._shards(params))
        self._most_stages = max((len(b.stages) for b in self._buckets), default=0)
        self._give_buffers()
        self._bucket_of = {id(p): i for i, b in enumerate(self._buckets) for p in b.params}
        for param in trained:
            self._hooks.enter_context(param.register_post_accumulate_grad_hook(weakly(self._arrived)))
        if trained and trained[0].is_cuda:
            # With high priority: the messages' kernels would otherwise wait behind those of backward.
            self._stream = torch.cuda.Stream(trained[0].device, priority=-1)

    def _in_place(self, params: list[Tensor]) -> Fp8Bucket:
        if (machines := self._machines) is None:
            return Fp8Bucket(params, self.group)
        return Fp8Bucket(params, machines.within, machines.across, self.observers)

    def _give_buffers(self) -> None:
        buckets = [b for b in self._buckets if isinstance(b, Fp8Bucket | Fp8ShardBucket)]
        if not buckets:
            return
        device = buckets[0].params[0].device
        group = buckets[0].group
        self._peers = self._peer_memory(max(b.layout.bytes for b in buckets), group, device)
        if self._peers is not None:
            for i, bucket in enumerate(buckets):
                bucket.buffers = PeerBuffers(bucket.layout, self._peers, i, self.observers)
            return
        # Gathers, of means or of the weights of shards, and exchanges have connections of their own.
        exchanges, gathers = (group, second(group)) if self._shards is None else (second(group), None)
        for bucket in buckets:
            bucket.buffers = CollectiveBuffers(bucket.layout, exchanges, gathers, device, self.observers)

    def _peer_memory(self, capacity: int, group: dist.ProcessGroup | None, device: torch.device) -> PeerMemory | None:
        if device.type != "cuda":
            return None
        if self._peers is not None and self._peers.capacity >= capacity:
            return self._peers
        torch.cuda.synchronize(device)  # before the old memory, which kernels may still read, is freed
        return PeerMemory.try_for(capacity, group, device)

    def _arrived(self, param: Tensor) -> None:
        if not self._active:
            return
        key = id(param)
        index = self._bucket_of[key]
        self._arrivals[key] += 1
        if key not in self._expected:
            return
        if index < self._launched:
            self._active = False
            raise RuntimeError(
                "A gradient was added to after it had been sent to the other processes. Reentrant activation "
                "checkpointing of layers that share a parameter does this: use use_reentrant=False."
            )
        if self._arrivals[key] == self._expected[key]:
            self._missing[index] -= 1
            while self._launched < len(self._buckets) and not self._missing[self._launched]:
                self._launch()

    @torch.no_grad()
    def _launch(self) -> None:
        """Send the next bucket, and go on with those before it."""
        index, self._launched = self._launched, self._launched + 1
        bucket = self._buckets[index]
        for param in bucket.params:
            if bucket.fill(param):
                self._made.append(param)
        with self._on_side_stream(after_current=True):
            bucket.launch()
            self._advance(index)

    def _advance(self, index: int) -> None:
        """Run the next stage of each bucket before ``index``, which counts on after the last bucket is sent."""
        for age, at in enumerate(range(index - 1, max(index - 1 - self._most_stages, -1), -1)):
            stages = self._buckets[at].stages if at < len(self._buckets) else ()
            if age < len(stages):
                stages[age]()

    def _on_side_stream(self, after_current: bool = False) -> Any:
        if self._stream is None:
            return nullcontext()
        if after_current:
            self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        return torch.cuda.stream(self._stream)

    def _ask_who_has(self) -> tuple[Tensor, Any]:
        """Start an int8 all-reduce that tells, per parameter, whether any rank has a gradient.

        Returns:
            The flags, int8 in the order of the buckets, and the handle of the all-reduce.
        """
        params = [p for b in self._buckets for p in b.params]
        made = {id(p) for p in self._made}
        device = params[0].device
        if self._all_there is None:
            self._all_there = torch.ones(len(params), dtype=torch.int8, device=device)
        # Where no gradient is missing, the tensor of ones is sent again: a maximum of ones is one.
        there = self._all_there
        if made:
            there = torch.tensor([id(p) not in made for p in params], dtype=torch.int8, device=device)
        for see in self.observers.message:
            see("all_reduce", there, 0, "flag")
        return there, dist.all_reduce(there, dist.ReduceOp.MAX, self.group, async_op=True)

    def _forget_unused(self, there: Tensor, work: Any) -> None:
        """Drop the zeros that were sent for gradients that no process has."""
        work.wait()
        if self._made:
            self._made = []
            pairs = [(p, b) for b in self._buckets for p in b.params]
            for (param, bucket), flag in zip(pairs, there.tolist(), strict=True):
                if not flag:
                    bucket.forget(param)

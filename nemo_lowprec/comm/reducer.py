"""Average gradients over processes while backward goes on.

Sources: bucketing in reverse order and overlap with backward are torch's DistributedDataParallel (arXiv:2006.15704).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from nemo_lowprec.comm.bucketing import BUCKET_BYTES, cut_into_buckets
from nemo_lowprec.comm.buckets import Bucket, Fp8Bucket, Fp8ShardBucket, PlainBucket
from nemo_lowprec.comm.exchange import CollectiveBuffers, PeerBuffers, PeerMemory
from nemo_lowprec.observers import NOBODY, Observers
from nemo_lowprec.tensors.weak_hooks import weakly

Wire = torch.dtype  # float8_e4m3fn for gradients stored in FP8


class GradientReducer:
    """Makes the gradient of every parameter the mean over the processes of a group, and equal on all of them.

    Between ``begin`` and ``finish`` lies a backward pass. As soon as it has made the gradients of a bucket (and of all
    before it, so that every process sends in the same order), the bucket is sent. A parameter that has a gradient on
    some processes only counts as zero on the others; one that has none anywhere keeps none.

    The first pass sends at its end, and learns how often each parameter's gradient is added to: several times where
    reentrant activation checkpointing recomputes a layer that is used more than once. Onto shards it sends as soon as
    it can: the whole model's gradients would not have a place.

    Args:
        params: the same ones, in the same order, on every process; those that are trained at ``begin`` are averaged.
        group: the processes, those of all buckets; None for all.
        wire: dtype of a parameter's gradient on the wire, ``float8_e4m3fn`` for one stored in FP8.
        bucket_bytes: size of a bucket on the wire.
        shards: the bucket for gradients in FP8 that are reduced onto shards; None where they are averaged in place.
        observers: the messages of all buckets are announced to them.

    Raises:
        RuntimeError: in backward, a gradient that grows after it was sent.
    """

    def __init__(
        self,
        params: Iterable[Tensor],
        group: dist.ProcessGroup | None,
        wire: Callable[[Tensor], Wire],
        bucket_bytes: int | None = None,
        shards: Callable[[list[Tensor]], Fp8ShardBucket] | None = None,
        observers: Observers = NOBODY,
    ) -> None:
        self.group, self.observers = group, observers
        self._shards = shards
        self._params = list({id(p): p for p in params}.values())
        self._wire = wire
        self._bucket_bytes = bucket_bytes or BUCKET_BYTES
        self._buckets: list[Bucket] = []
        self._built_for: list[tuple[int, torch.device]] = []
        self._bucket_of: dict[int, int] = {}
        self._handles: list[Any] = []
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
        """A backward pass begins whose gradients, and those that earlier ones have left, are to be averaged."""
        if self._is_alone():
            return
        self._fit()
        self._arrivals.clear()
        self._missing = [len(b.params) for b in self._buckets]
        self._launched = 0
        self._active = True

    @torch.no_grad()
    def finish(self) -> None:
        """The backward pass is over: average what was not yet, and wait (on a GPU, let its stream wait)."""
        if self._is_alone():
            return
        self._active = False
        while self._launched < len(self._buckets):
            self._launch()
        # On shards after all else: all have read what they received then (``PeerMemory``).
        there = self._ask_who_has() if self._shards is None else None
        with self._on_side_stream():
            for bucket in self._buckets[-1:]:
                bucket.advance()
            for bucket in self._buckets[-2:]:
                bucket.complete()
        if self._stream is not None:
            torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)
        self._forget_unused(*(there or self._ask_who_has()))
        for key in self._bucket_of:
            self._expected[key] = max(self._expected.get(key, 1), self._arrivals[key])

    def abandon(self) -> None:
        """The backward pass has failed: send nothing more of it."""
        self._active = False
        self._made = []

    def _is_alone(self) -> bool:
        """Whether there is nothing to do: one process's gradients are the means, where they are not put on shards."""
        return self._shards is None and dist.get_world_size(self.group) == 1

    def reduce(self) -> None:
        """Average the gradients that are there."""
        self.begin()
        self.finish()

    def remove(self) -> None:
        """Take the hooks away."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._built_for = []

    def _fit(self) -> None:
        """Cut the parameters that are trained by now into buckets, in about the order that backward reaches them."""
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
            self._close(wire, params)
        self._give_buffers()
        self._bucket_of = {id(p): i for i, b in enumerate(self._buckets) for p in b.params}
        self._handles = [p.register_post_accumulate_grad_hook(weakly(self._arrived)) for p in trained]
        if trained and trained[0].is_cuda:
            # Ahead of backward, whose kernels it would otherwise wait behind while the links have nothing to do.
            self._stream = torch.cuda.Stream(trained[0].device, priority=-1)

    def _close(self, wire: Wire, params: list[Tensor]) -> None:
        if wire != torch.float8_e4m3fn:
            self._buckets.append(PlainBucket(params, self.group, wire, self.observers))
        else:
            self._buckets.append(Fp8Bucket(params, self.group) if self._shards is None else self._shards(params))

    def _give_buffers(self) -> None:
        buckets = [b for b in self._buckets if isinstance(b, Fp8Bucket | Fp8ShardBucket)]
        if not buckets:
            return
        device = buckets[0].params[0].device
        self._peers = self._peer_memory(max(b.layout.bytes for b in buckets), buckets[0].group, device)
        for i, bucket in enumerate(buckets):
            if self._peers is not None:
                bucket.buffers = PeerBuffers(bucket.layout, self._peers, i, self.observers)
            else:
                bucket.buffers = CollectiveBuffers(bucket.layout, bucket.group, device, self.observers)

    def _peer_memory(self, capacity: int, group: dist.ProcessGroup | None, device: torch.device) -> PeerMemory | None:
        if device.type != "cuda":
            return None
        if self._peers is not None and self._peers.capacity >= capacity:
            return self._peers
        torch.cuda.synchronize(device)  # nobody reads what is given back
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
        """Send the next bucket, while the one before is summed and the one before that is stored."""
        index, self._launched = self._launched, self._launched + 1
        bucket = self._buckets[index]
        for param in bucket.params:
            if bucket.fill(param):
                self._made.append(param)
        with self._on_side_stream(after_current=True):
            bucket.launch()
            if index > 0:
                self._buckets[index - 1].advance()
            if index > 1:
                self._buckets[index - 2].complete()

    def _on_side_stream(self, after_current: bool = False) -> Any:
        if self._stream is None:
            return nullcontext()
        if after_current:
            self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        return torch.cuda.stream(self._stream)

    def _ask_who_has(self) -> tuple[Tensor | None, Any]:
        """Start an int8 all-reduce that tells, per parameter, whether any rank has a gradient.

        Returns:
            the flags, in the order of the buckets, and the async handle.
        """
        params = [p for b in self._buckets for p in b.params]
        if not params:
            return None, None
        made = {id(p) for p in self._made}
        device = params[0].device
        if self._all_there is None:
            self._all_there = torch.ones(len(params), dtype=torch.int8, device=device)
        # The maximum of ones is ones: what is sent where nothing is missing need not be made anew.
        there = self._all_there
        if made:
            there = torch.tensor([id(p) not in made for p in params], dtype=torch.int8, device=device)
        for see in self.observers.message:
            see("all_reduce", there, 0, "flag")
        return there, dist.all_reduce(there, dist.ReduceOp.MAX, self.group, async_op=True)

    def _forget_unused(self, there: Tensor | None, work: Any) -> None:
        """Take the zeros away that stand for gradients which no process has."""
        if there is None:
            return
        work.wait()
        if self._made:
            self._made = []
            pairs = [(p, b) for b in self._buckets for p in b.params]
            for (param, bucket), flag in zip(pairs, there.tolist(), strict=True):
                if not flag:
                    bucket.forget(param)

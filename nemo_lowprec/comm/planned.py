"""What averaging gradients takes, without processes: the messages that are sent, and the most that buffers hold.

The same parameters are cut into the same buckets and laid out in the same messages as by ``GradientReducer``; how long
a buffer lives is told in ``exchange`` and ``buckets``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nemo_lowprec.comm.bucketing import BUCKET_BYTES, cut_into_buckets
from nemo_lowprec.comm.buckets import IN_PLACE
from nemo_lowprec.comm.exchange import PeerMemory
from nemo_lowprec.comm.wire import Messages, by_rows
from nemo_lowprec.formats.block_scale_128 import BLOCK

__all__ = ["Message", "PlannedBucket", "buffer_bytes", "peer_bytes", "plan_buckets"]


@dataclass(frozen=True)
class Message:
    """One collective.

    Attributes:
        kind: ``all_reduce``, ``all_gather``, ``reduce_scatter`` or ``all_to_all``.
        dtype: of the elements, ``float8_e4m3fn`` for blocks in FP8 (which travel as bytes, exponents included).
        bytes: that a process puts in.
        world: processes of its group.
    """

    kind: str
    dtype: torch.dtype
    bytes: int
    world: int


@dataclass(frozen=True)
class PlannedBucket:
    """Gradients that travel together.

    Attributes:
        params: whose gradients they are.
        messages: that are sent for them.
        launched: bytes of buffers from when they are sent until they are summed.
        advanced: bytes of buffers from then until the means are stored.
        capacity: bytes of the largest message between two processes; 0 where peers exchange none.
    """

    params: tuple[Tensor, ...]
    messages: tuple[Message, ...]
    launched: int
    advanced: int
    capacity: int = 0


def plan_buckets(
    params: Iterable[Tensor],
    wire: Callable[[Tensor], torch.dtype],
    world: int,
    bucket_bytes: int | None = None,
    onto_shards: bool = False,
    replicas: int = 1,
    peers: bool = False,
) -> list[PlannedBucket]:
    """The buckets of a ``GradientReducer`` with these arguments.

    Args:
        params: those that are trained, in the model's order.
        wire: dtype of a parameter's gradient on the wire.
        world: processes that average, or (``onto_shards``) that hold one copy of the model.
        bucket_bytes: size of a bucket on the wire; None for the default.
        onto_shards: whether gradients, all in FP8, are reduced onto shards (``Fp8ShardBucket``).
        replicas: copies of the model whose shards are averaged then.
        peers: whether processes exchange messages through ``PeerMemory``.
    """
    planned = []
    for dtype, members in cut_into_buckets(list(params)[::-1], wire, bucket_bytes or BUCKET_BYTES):
        if dtype != torch.float8_e4m3fn:
            planned.append(_plain(members, dtype, world))
        elif onto_shards:
            planned.append(_onto_shards(members, world, replicas, peers))
        else:
            planned.append(_in_fp8(members, world, peers))
    return planned


def _plain(params: Sequence[Tensor], dtype: torch.dtype, world: int) -> PlannedBucket:
    """``PlainBucket``."""
    copied = sum(p.numel() for p in params if p.numel() < IN_PLACE) * dtype.itemsize
    size = sum(p.numel() for p in params) * dtype.itemsize
    return PlannedBucket(tuple(params), (Message("all_reduce", dtype, size, world),), copied, copied)


def _in_fp8(params: Sequence[Tensor], world: int, peers: bool) -> PlannedBucket:
    """``Fp8Bucket``: what is sent and received; then what is gathered and the mean."""
    one = Messages.in_turn([p.shape for p in params], world).bytes
    messages = _all_to_all(world * one, world), Message("all_gather", torch.float8_e4m3fn, one, world)
    if peers:
        return PlannedBucket(tuple(params), messages, 0, 0, one)
    return PlannedBucket(tuple(params), messages, 2 * world * one, (world + 1) * one)


def _onto_shards(params: Sequence[Tensor], world: int, replicas: int, peers: bool) -> PlannedBucket:
    """``Fp8ShardBucket``: what is sent and received; then the mean, and what is sent and received of it again."""
    layout, own = by_rows([p.shape for p in params], world, 0)
    one = layout.bytes
    messages = [_all_to_all(world * one, world)]
    advanced = 0 if peers else one
    if replicas > 1:
        again = Messages.in_turn([torch.Size((own.chunk, BLOCK))], replicas).bytes
        messages += [
            _all_to_all(replicas * again, replicas), Message("all_gather", torch.float8_e4m3fn, again, replicas)
        ]  # fmt: skip
        advanced += 2 * replicas * again
    return PlannedBucket(
        tuple(params), tuple(messages), 0 if peers else 2 * world * one, advanced, one if peers else 0
    )  # fmt: skip


def _all_to_all(size: int, world: int) -> Message:
    return Message("all_to_all", torch.float8_e4m3fn, size, world)


def buffer_bytes(
    buckets: Sequence[PlannedBucket], world: int, beside: Callable[[int | None], int] | None = None
) -> int:
    """The most that buffers of these buckets hold at a time, ``PeerMemory`` included.

    A bucket is sent while the one before waits to be summed, and the one before that to be stored.

    Args:
        beside: bytes of other buffers while the bucket of an index is sent, and (None) the most at other times.
    """
    most = 0
    for i, bucket in enumerate(buckets):
        before = buckets[i - 1] if i > 0 else None
        stored = buckets[i - 2].advanced if i > 1 else 0
        sending = bucket.launched + (before.launched if before else 0) + stored
        then = bucket.launched + (before.advanced if before else 0) if i + 1 < len(buckets) else 0
        most = max(most, sending + (beside(i) if beside else 0), then + (beside(None) if beside else 0))
    return most + peer_bytes(buckets, world)


def peer_bytes(buckets: Sequence[PlannedBucket], world: int) -> int:
    """Bytes of ``PeerMemory``, which the first exchange allocates and keeps; 0 without buckets."""
    capacity = max((b.capacity for b in buckets), default=0)
    return PeerMemory.bytes_for(capacity, world) if capacity else 0

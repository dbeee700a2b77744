"""Plans the averaging of gradients without processes: the messages, and the peak bytes of the buffers.

Buckets and messages are cut as ``GradientReducer`` cuts them; buffers live as long as in ``exchange`` and ``buckets``.
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


@dataclass(frozen=True)
class Message:
    """One collective."""

    kind: str  # all_reduce, all_gather, reduce_scatter, all_to_all or send
    dtype: torch.dtype  # of the elements; float8_e4m3fn for blocks in FP8, which travel as bytes with their exponents
    bytes: int  # size of one process's input
    world: int  # number of processes in the group


@dataclass(frozen=True)
class PlannedBucket:
    """Gradients that are sent together."""

    params: tuple[Tensor, ...]  # the parameters of these gradients
    messages: tuple[Message, ...]  # the collectives that average the gradients
    held: tuple[int, ...]  # bytes of buffers after sending, and after each of the bucket's stages but the last
    capacity: int = 0  # bytes of the largest message between two processes; 0 where peers exchange none


def plan_buckets(
    params: Iterable[Tensor],
    wire: Callable[[Tensor], torch.dtype],
    world: int,
    bucket_bytes: int | None = None,
    onto_shards: bool = False,
    replicas: int = 1,
    machines: int = 1,
    peers: bool = False,
) -> list[PlannedBucket]:
    """The buckets of a ``GradientReducer`` with these arguments.

    Args:
        params: trained parameters, in the model's order.
        wire: dtype of a parameter's gradient on the wire.
        world: number of processes that average; with ``onto_shards``, that hold one copy of the model.
        bucket_bytes: size of a bucket on the wire; None for the default.
        onto_shards: whether gradients, all in FP8, are reduced onto shards (``Fp8ShardBucket``).
        replicas: with ``onto_shards``, number of copies of the model, whose shards are averaged.
        machines: without ``onto_shards``, number of machines whose means are averaged (see ``Machines``); 1 where all
            processes average at once.
        peers: whether processes exchange messages through ``PeerMemory``.
    """
    planned = []
    for dtype, members in cut_into_buckets(list(params)[::-1], wire, bucket_bytes or BUCKET_BYTES):
        if dtype != torch.float8_e4m3fn:
            planned.append(_plain(members, dtype, world))
        elif onto_shards:
            planned.append(_onto_shards(members, world, replicas, peers))
        else:
            planned.append(_in_fp8(members, world // machines, machines, peers))
    return planned


def _plain(params: Sequence[Tensor], dtype: torch.dtype, world: int) -> PlannedBucket:
    """The plan of a ``PlainBucket``."""
    copied = sum(p.numel() for p in params if p.numel() < IN_PLACE) * dtype.itemsize
    size = sum(p.numel() for p in params) * dtype.itemsize
    return PlannedBucket(tuple(params), (Message("all_reduce", dtype, size, world),), (copied, copied))


def _in_fp8(params: Sequence[Tensor], within: int, machines: int, peers: bool) -> PlannedBucket:
    """The plan of an ``Fp8Bucket``: sent and received messages; then the mean, and the gathered means.

    Of several machines, the messages between them stand beside the mean, before its gathering.
    """
    layout = Messages.in_turn([p.shape for p in params], within)
    one = layout.bytes
    again, between = _again(layout, machines)
    messages = _all_to_all(one, within), *again, _all_gather(one, within)
    sent, mean, gathered = (0, 0, 0) if peers else (2 * within * one, one, within * one)
    after = tuple(mean + b for b in between) if machines > 1 else (mean + gathered,)
    return PlannedBucket(tuple(params), messages, (sent, *after), one if peers else 0)


def _onto_shards(params: Sequence[Tensor], world: int, replicas: int, peers: bool) -> PlannedBucket:
    """The plan of an ``Fp8ShardBucket``: sent and received messages; then the mean, and with replicas its messages."""
    layout, own = by_rows([p.shape for p in params], world, 0)
    one = layout.bytes
    again, between = _again(own, replicas)
    sent, mean = (0, 0) if peers else (2 * world * one, one)
    after = tuple(mean + b for b in between or (0,))
    return PlannedBucket(tuple(params), (_all_to_all(one, world), *again), (sent, *after), one if peers else 0)


def _again(message: Messages, replicas: int) -> tuple[tuple[Message, ...], tuple[int, ...]]:
    """The messages of ``Replicas``, and the bytes of its buffers after sending and after averaging; none for one."""
    if replicas == 1:
        return (), ()
    one = Messages.in_turn([torch.Size((message.chunk, BLOCK))], replicas).bytes
    return (_all_to_all(one, replicas), _all_gather(one, replicas)), (2 * replicas * one, (replicas + 1) * one)


def _all_to_all(one: int, world: int) -> Message:
    return Message("all_to_all", torch.float8_e4m3fn, world * one, world)


def _all_gather(one: int, world: int) -> Message:
    return Message("all_gather", torch.float8_e4m3fn, one, world)


def buffer_bytes(
    buckets: Sequence[PlannedBucket], world: int, beside: Callable[[int | None], int] = lambda index: 0
) -> int:
    """The peak bytes of the buffers of these buckets, ``PeerMemory`` included.

    While a bucket is sent, each bucket before it waits for its next stage.

    Args:
        world: number of processes that exchange messages through ``PeerMemory``.
        beside: bytes of other buffers while the bucket of this index is sent; for None, the peak at other times.
    """

    deepest = max((len(b.held) for b in buckets), default=0)

    def held(sent: int, more: int) -> int:
        """Bytes when bucket ``sent`` is sent, and ``more`` (0 or 1) stages of the buckets before have run."""
        before = buckets[max(sent - deepest, 0) : sent][::-1]
        return buckets[sent].held[0] + sum(sum(b.held[i + more : i + more + 1]) for i, b in enumerate(before))

    peak = 0
    for i in range(len(buckets)):
        then = held(i, 1) if i + 1 < len(buckets) else 0
        peak = max(peak, held(i, 0) + beside(i), then + beside(None))
    return peak + peer_bytes(buckets, world)


def peer_bytes(buckets: Sequence[PlannedBucket], world: int) -> int:
    """Bytes of ``PeerMemory``, allocated at the first exchange and kept; 0 without buckets.

    Args:
        world: number of processes that exchange messages through ``PeerMemory``.
    """
    return PeerMemory.bytes_for(max((b.capacity for b in buckets), default=0), world)

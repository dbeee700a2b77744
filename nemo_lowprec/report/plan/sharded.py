"""The plan of a process that has shards: ``lowprec_sharded``, on FSDP2.

FSDP2 gathers one unit at a time (a block, or the root: what is in no block) into one flat buffer, which is then copied
into the whole weights. In forward that buffer lives until the next unit's is there; in backward the next unit is
prefetched while this one computes. The root stays gathered from forward to backward.

Source: torch/distributed/fsdp/_fully_shard: ``foreach_all_gather``, ``foreach_reduce`` and ``FSDPParamGroup``.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor, nn

from nemo_lowprec.comm.planned import Message, PlannedBucket, buffer_bytes, peer_bytes, plan_buckets
from nemo_lowprec.engine import Engine
from nemo_lowprec.report.plan.columns import ADAM, PlannedColumn, PlannedProcess, columns_of_chart
from nemo_lowprec.report.plan.layout import Layout
from nemo_lowprec.report.plan.on_meta import planned_moments
from nemo_lowprec.report.plan.units import ShardedParam, Units, gathered_bytes, reduced_bytes, units_of
from nemo_lowprec.tensors import Fp8Gathered, GradientTensor


def plan_sharded(model: nn.Module, engine: Engine, layout: Layout) -> PlannedProcess:
    """The plan of ``model``, which was converted on the meta device and is not yet stored in the level's formats."""
    engine.columns.comm.check_averaging()
    units = units_of(model, engine, layout.shards)
    buckets = plan_buckets(
        [p.whole for p in units.params if p.in_fp8],
        lambda _: torch.float8_e4m3fn,
        layout.shards,
        onto_shards=True,
        replicas=layout.replicas,
        peers=layout.peers(layout.shards),
    )
    weights, masters, gradients, states = _of_chart(units, engine, planned_moments(model))
    gathered, whole = _gathered(units, layout), _whole_gradients(units, buckets, layout)
    buffers = _buffers(units, buckets, layout)
    columns = [weights, gathered, masters, gradients, whole, states, buffers]
    messages = [m for bucket in buckets for m in bucket.messages] + _of_fsdp(units, layout)
    padding = sum(p.padded for p in units.params) / sum(p.whole.numel() for p in units.params) - 1
    # From one micro-batch to the next, whole gradients stay; and so does the memory that peers write to.
    stays = peer_bytes(buckets, layout.shards) + (whole.bytes if layout.micro_batches > 1 else 0)
    last = units.root + (units.blocks[-1] if units.blocks else [])  # whose buffer nothing else has taken the place of
    after = gathered_bytes(last) if layout.reshard_after_forward else gathered.bytes
    in_blocks = gathered.bytes + _forward_buffers(units, layout) + stays
    beside = in_blocks, after + stays, gathered.bytes + whole.bytes + buffers.bytes
    return PlannedProcess(columns, {"": messages}, beside, padding)


def _of_chart(units: Units, engine: Engine, moments: dict[int, tuple[str, ...]]) -> tuple[PlannedColumn, ...]:
    """Weight, Master weight, Weight gradient and Optimizer states, of the shards."""
    weights, masters, gradients, states = columns_of_chart()
    of_halves = engine.level.has_half_weights and not engine.level.is_low_bit
    for p in units.params:
        is_master = of_halves or isinstance(p.shard, Fp8Gathered)
        (masters if is_master else weights).add(p.part, p.shard)
        if p.whole.requires_grad:
            states.add_states(p.part, p.whole, p.shard, engine.options, moments.get(id(p.whole), ADAM))
            plain = torch.empty(p.shard.shape, dtype=p.whole.dtype, device="meta")
            gradients.add(p.part, GradientTensor.empty(p.shard) if p.in_fp8 else plain)
    return weights, masters, gradients, states


def _gathered(units: Units, layout: Layout) -> PlannedColumn:
    """Whole weights: the root and one block at a time (ZeRO-3), or all (ZeRO-2)."""
    there = PlannedColumn("Gathered weights", "at most")
    one = units.root + max(units.blocks, key=gathered_bytes, default=[])
    for p in one if layout.reshard_after_forward else units.params:
        there.add_bytes(p.part, p.gathered, p.padded * p.gathered.itemsize)
    return there


def _whole_gradients(units: Units, buckets: list[PlannedBucket], layout: Layout) -> PlannedColumn:
    """Gradients that are not yet on shards.

    FSDP2 reduces those of a unit together, so that the head's are there while the blocks' come and go.
    """
    there = PlannedColumn("Whole gradients", "at most")
    accumulates = layout.micro_batches > 1

    def size(params: list[ShardedParam]) -> int:
        return sum(p.whole.numel() * p.gradient.itemsize for p in params if p.reduced is not None)

    with_block = units.after + max(units.blocks, key=size, default=[])
    for p in units.params if accumulates else max(with_block, units.root, key=size):
        if p.reduced is not None:
            # While they add up, FSDP2 keeps them in the dtype that it reduces.
            dtype = p.reduced if accumulates else p.gradient
            there.add_bytes(p.part, dtype, p.whole.numel() * dtype.itemsize)
    stored = [sum(GradientTensor.empty(p).stored_bytes() for p in bucket.params) for bucket in buckets]
    waiting = sum(stored) if accumulates else max(stored, default=0)
    there.add_bytes("all", torch.float8_e4m3fn, waiting)
    return there


def _buffers(units: Units, buckets: list[PlannedBucket], layout: Layout) -> PlannedColumn:
    """Flat buffers of FSDP2, and those of gradients in FP8 that are sent during backward."""
    held = PlannedColumn("Communication buffers", "at most")
    if layout.shards == 1:
        # FSDP2 copies the one shard, without a buffer.
        held.add_bytes("all", torch.float8_e4m3fn, buffer_bytes(buckets, 1))
        return held
    backward = {id(p.whole): size for unit, size in _in_backward(units, layout) for p in unit}
    most = max(backward.values(), default=0)

    def beside(index: int | None) -> int:
        if index is None:
            return most
        last: Tensor = buckets[index].params[-1]
        # The last bucket is under way when FSDP2 reduces the root's, after the whole backward pass.
        then = reduced_bytes(units.root) if index == len(buckets) - 1 else 0
        return max(backward[id(last)], then)

    fp8 = buffer_bytes(buckets, layout.shards, beside)
    fsdp = max(_forward_buffers(units, layout), reduced_bytes(units.root), most)
    held.add_bytes("all", torch.float8_e4m3fn if fp8 > fsdp else units.params[0].gathered, max(fp8, fsdp))
    return held


def _forward_buffers(units: Units, layout: Layout) -> int:
    """Bytes of the flat buffers of two units in a row, in forward."""
    if layout.shards == 1:
        return 0
    pairs = [gathered_bytes(a) + gathered_bytes(b) for a, b in pairwise(units.all)]
    return max(*pairs, gathered_bytes(units.root)) if pairs else gathered_bytes(units.root)


def _in_backward(units: Units, layout: Layout) -> list[tuple[list[ShardedParam], int]]:
    """Bytes of flat buffers while the gradients of some parameters are made: of the weights that are prefetched, and
    of the gradients that were reduced last."""
    ahead = [gathered_bytes(block) if layout.reshard_after_forward else 0 for block in units.blocks]
    behind = [reduced_bytes(block) for block in units.blocks]
    found = [(units.after, ahead[-1] if ahead else 0), (units.before, behind[0] if behind else 0)]
    for i, block in enumerate(units.blocks):
        # Until its own are reduced, those of the block behind it are there.
        last = max(behind[i : i + 2])
        found.append((block, (ahead[i - 1] if i > 0 else 0) + last))
    return found


def _of_fsdp(units: Units, layout: Layout) -> list[Message]:
    """Weights that are gathered, and gradients that FSDP2 reduces."""
    messages = []
    shards = layout.shards
    for unit in units.all:
        passes = 1 if unit is units.root or not layout.reshard_after_forward else 2
        for p in unit:
            if shards > 1:
                gather = Message("all_gather", p.gathered, p.padded * p.gathered.itemsize // shards, shards)
                messages += [gather] * (passes * layout.micro_batches)
            if p.reduced is None:
                continue
            size = p.padded * p.reduced.itemsize
            if shards > 1:
                messages.append(Message("reduce_scatter", p.reduced, size, shards))
            if layout.replicas > 1:
                messages.append(Message("all_reduce", p.reduced, size // shards, layout.replicas))
    return messages

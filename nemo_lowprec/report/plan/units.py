"""The units that FSDP2 gathers together, and what a process keeps of each of their parameters.

A process holds ceil(rows / processes) rows of every parameter, padded with zeros where there are fewer.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import takewhile

import torch
from torch import Tensor, nn

from nemo_lowprec.engine import Engine, mixed_precision_policy
from nemo_lowprec.report.plan.on_meta import planned_parts
from nemo_lowprec.strategies.shard import blocks_of
from nemo_lowprec.tensors import BlockShard, HalfShard, PlainShard
from nemo_lowprec.weights import kept_in_fp32


@dataclass(frozen=True)
class ShardedParam:
    """One parameter.

    Attributes:
        part: the parameter's part of ``report.parts``.
        whole: the model's parameter, on the meta device.
        shard: the rows that one process keeps.
        gathered: dtype in which the parameter is gathered.
        padded: elements of all shards together.
        reduced: dtype in which FSDP2 reduces the gradient; None for a gradient in FP8, and for a frozen parameter.
        gradient: dtype of the whole gradient before FSDP2 reduces it.
    """

    part: str
    whole: nn.Parameter
    shard: Tensor
    gathered: torch.dtype
    padded: int
    reduced: torch.dtype | None
    gradient: torch.dtype

    @property
    def in_fp8(self) -> bool:
        """Whether the gradient is stored in FP8."""
        return self.whole.requires_grad and self.reduced is None


def gathered_bytes(params: list[ShardedParam]) -> int:
    """Bytes of the whole weights, padded."""
    return sum(p.padded * p.gathered.itemsize for p in params)


def reduced_bytes(params: list[ShardedParam]) -> int:
    """Bytes of the whole gradients that FSDP2 reduces, padded, in the dtype of the reduction."""
    return sum(p.padded * p.reduced.itemsize for p in params if p.reduced is not None)


@dataclass(frozen=True)
class Units:
    """All parameters of a model, in its order.

    Attributes:
        before, after: parameters outside of blocks, before the first block and behind it: together the root unit. A
            parameter that a module around blocks holds itself may be used at any time, and counts as behind: its
            gradient is there while gradients of blocks come and go.
        blocks: the parameters of each block, which are one unit.
        params: all parameters, in the model's order.
    """

    before: list[ShardedParam]
    blocks: list[list[ShardedParam]]
    after: list[ShardedParam]
    params: list[ShardedParam]

    @cached_property
    def root(self) -> list[ShardedParam]:
        """The unit of all parameters outside of blocks."""
        return self.before + self.after

    @cached_property
    def all(self) -> list[list[ShardedParam]]:
        """The units in the order of forward."""
        return [self.root, *self.blocks]


def units_of(model: nn.Module, engine: Engine, shards: int) -> Units:
    """Cut a model as ``shard_model`` does, for so many shards.

    Raises:
        ValueError: a parameter without dimensions, which FSDP2 does not shard.
    """
    part_of = {id(p): part for part, params in planned_parts(model, engine).items() for p in params}
    fp8_params = engine.recipe is not None and engine.recipe.fp8_params
    low = engine.columns.computation.conversion.weights if engine.level.weight == "fp8" or fp8_params else []
    in_fp8 = {id(model.get_parameter(name)) for name in low}
    for name, param in model.named_parameters():
        if not param.dim():
            raise ValueError(f"{name} has no dimension, and cannot be sharded. Give it one, or use lowprec_ddp.")

    in_fp32 = kept_in_fp32(model, engine.level.is_low_bit)
    of = {
        id(p): _sharded(p, part_of[id(p)], id(p) in in_fp8, id(p) in in_fp32, engine, shards)
        for p in model.parameters()
    }
    blocks: list[list[int]] = []
    seen: set[int] = set()
    for block in blocks_of(model):
        blocks.append([id(p) for p in block.parameters() if id(p) not in seen])
        seen.update(blocks[-1])
    modules = set(map(id, blocks_of(model)))
    around = [m for m in model.modules() if any(id(inner) in modules for inner in m.modules())]
    anytime = {id(p) for m in around for p in m._parameters.values()}
    before = set(takewhile(lambda i: i not in seen, of)) - anytime
    return Units(
        [of[i] for i in of if i in before],
        [[of[i] for i in block] for block in blocks],
        [of[i] for i in of if i not in before and i not in seen],
        list(of.values()),
    )


def _sharded(param: nn.Parameter, part: str, in_fp8: bool, in_fp32: bool, engine: Engine, shards: int) -> ShardedParam:
    """``param`` in the formats in which ``ShardedWeights`` stores and gathers it."""
    level, policy = engine.level, mixed_precision_policy(engine.level)
    rows = -(-param.shape[0] // shards)
    dtype = torch.float32 if param.requires_grad else param.dtype  # as ``shard_model`` makes it
    local = torch.empty(rows, *param.shape[1:], dtype=dtype, device="meta")
    shard: Tensor = local
    gathered = dtype if in_fp32 else policy.param_dtype or dtype
    low_bit = level.is_low_bit and param.dim() > 1 and not in_fp32
    if in_fp8:
        gathered = torch.float8_e4m3fn
        if level.is_low_bit:
            shard = BlockShard.of(local, engine.reads_as, 0)
        else:
            shard = PlainShard(local, engine.half, 0)
    elif low_bit and dtype == torch.float32:
        shard = HalfShard(local.to(torch.float16), engine.reads_as)
        gathered = torch.float16
    stays_half = level.has_half_weights and level.weight_grad != "fp32" and not level.is_low_bit
    gradient = engine.half if stays_half else torch.float32
    of_fsdp = param.requires_grad and not low_bit
    reduced = (policy.reduce_dtype or gradient) if of_fsdp else None
    return ShardedParam(part, param, shard, gathered, rows * shards * param[0].numel(), reduced, gradient)

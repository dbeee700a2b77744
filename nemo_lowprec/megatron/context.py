"""Context parallelism: cuts each sequence into the parts of the processes."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor


def zigzag(tensor: Tensor, rank: int, world: int) -> Tensor:
    """The ``rank``-th chunk of dimension 1 from the front, and the ``rank``-th from the back, concatenated.

    Causal attention then costs the same on every rank. Transformer Engine's attention expects this order.

    Args:
        tensor: [batch, sequence, ...].
        rank, world: of the process in its context-parallel group, and the group's size.

    Raises:
        ValueError: the sequence does not divide into two chunks for each process.
    """
    if tensor.shape[1] % (2 * world):
        raise ValueError(
            f"Sequences of {tensor.shape[1]} tokens do not divide into two parts for each of context_parallel_size="
            f"{world} processes."
        )
    chunks = tensor.chunk(2 * world, dim=1)
    return torch.cat([chunks[rank], chunks[2 * world - 1 - rank]], dim=1)


def part_of_sequence(batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """This process's part of each tensor [batch, sequence] of a batch; whole tensors without context parallelism."""
    world = parallel_state.get_context_parallel_world_size()
    if world == 1:
        return dict(batch)
    rank = parallel_state.get_context_parallel_rank()
    return {name: zigzag(tensor, rank, world) for name, tensor in batch.items()}


def over_context(count: Tensor) -> Tensor:
    """The sum of ``count``, of any shape, over the context-parallel processes."""
    if parallel_state.get_context_parallel_world_size() == 1:
        return count
    whole = count.clone()
    dist.all_reduce(whole, group=parallel_state.get_context_parallel_group())
    return whole

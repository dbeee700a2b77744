"""What processes must agree on beside gradients: the weights that they start from, and amaxes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor

from nemo_lowprec.formats import StoredTensor

__all__ = [
    "anywhere_",
    "bookkeeping",
    "broadcast_weights",
    "check_same",
    "is_bookkeeping",
    "raise_together",
    "reduce_amax",
]

_depth = 0


@contextmanager
def bookkeeping() -> Iterator[None]:
    """Around amaxes and flags that are sent beside gradients and weights, for whoever counts bytes."""
    global _depth
    _depth += 1
    try:
        yield
    finally:
        _depth -= 1


def is_bookkeeping() -> bool:
    """Whether what is sent now is an amax or a flag."""
    return _depth > 0


@torch.no_grad()
def broadcast_weights(params: Iterable[Tensor], group: dist.ProcessGroup | None = None) -> None:
    """Give every process the weights (and masters) that the first one of ``group`` has."""
    source = dist.get_global_rank(group, 0) if group is not None else 0
    for param in params:
        for tensor in (param, getattr(param, "master_weight", None)):
            for part in tensor.parts() if isinstance(tensor, StoredTensor) else () if tensor is None else (tensor,):
                plain = part.detach()
                dist.broadcast(plain.view(torch.uint8) if plain.element_size() == 1 else plain, source, group)


@torch.no_grad()
def reduce_amax(amax: Tensor, group: dist.ProcessGroup | None = None) -> None:
    """Make amaxes (FP32, any shape) the maxima over the processes, in place; infinite where one is not finite.

    A maximum of NaN and a number is the number in some collectives.
    """
    amax.nan_to_num_(nan=torch.inf, posinf=torch.inf)
    with bookkeeping():
        dist.all_reduce(amax, dist.ReduceOp.MAX, group)


def anywhere_(flag: Tensor, group: dist.ProcessGroup | None = None) -> None:
    """Make ``flag`` (0 or 1) what it is on any process of ``group``, in place."""
    if dist.get_world_size(group) == 1:
        return
    with bookkeeping():
        dist.all_reduce(flag, dist.ReduceOp.MAX, group)


def check_same(facts: Mapping[str, str], group: dist.ProcessGroup | None = None) -> None:
    """Compare what every process of ``group`` is about to train, and with what.

    Raises:
        ValueError: on every process, where two differ; naming what differs, and on which processes.
    """
    gathered: list[Mapping[str, str]] = [{} for _ in range(dist.get_world_size(group))]
    dist.all_gather_object(gathered, dict(facts), group=group)
    for name in facts:
        processes: dict[str, list[int]] = {}
        for rank, theirs in enumerate(gathered):
            processes.setdefault(theirs.get(name, "missing"), []).append(rank)
        if len(processes) > 1:
            found = "; ".join(f"{value} on rank {_some(ranks)}" for value, ranks in processes.items())
            raise ValueError(f"Processes that train one model must agree on {name}. There is {found}.")


def raise_together(error: Exception | None, group: dist.ProcessGroup | None = None) -> None:
    """Stop all processes of ``group`` for what is wrong with one: the others would wait for it.

    Raises:
        Exception: on every process, the error of the first one that has one; on that one its own.
    """
    errors: list[Exception | None] = [None] * dist.get_world_size(group)
    dist.all_gather_object(errors, error, group=group)
    if error is not None:
        raise error
    for found in filter(None, errors):
        raise found


def _some(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")

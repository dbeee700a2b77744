"""Settings, first weights, amaxes and flags that processes must have in common, beside gradients."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from nemo_lowprec.compat.distributed import default_store
from nemo_lowprec.observers import NOBODY, Observers
from nemo_lowprec.tensors import QuantizedTensor


@torch.no_grad()
def broadcast_weights(
    params: Iterable[Tensor], group: dist.ProcessGroup | None = None, observers: Observers = NOBODY
) -> bool:
    """Give every process the weights and masters of the first process of ``group``.

    Returns:
        Whether this process had other values. The host waits for the device.
    """
    source = dist.get_global_rank(group, 0) if group is not None else 0
    changed: list[Tensor] = []
    for param in params:
        for tensor in (param, getattr(param, "master_weight", None)):
            for part in tensor.parts() if isinstance(tensor, QuantizedTensor) else () if tensor is None else (tensor,):
                plain = part.detach()
                plain = plain.view(torch.uint8) if plain.element_size() == 1 else plain
                there = plain.to(param.device)  # the original values of a frozen weight are on the CPU
                before = there.clone()
                for see in observers.message:
                    see("broadcast", there, 0, "weight")
                dist.broadcast(there, source, group)
                changed.append((there != before).any())
                if there is not plain:
                    plain.copy_(there)
    return bool(torch.stack(changed).any()) if changed else False


@torch.no_grad()
def reduce_amax(amax: Tensor, group: dist.ProcessGroup | None = None, observers: Observers = NOBODY) -> None:
    """Replace amaxes (FP32, any shape) by their maxima over the processes, in place; infinite where not finite.

    NaN becomes infinity first: in some collectives the maximum of NaN and a number is the number.
    """
    amax.nan_to_num_(nan=torch.inf, posinf=torch.inf)
    for see in observers.message:
        see("all_reduce", amax, 0, "amax")
    dist.all_reduce(amax, dist.ReduceOp.MAX, group)


def any_rank_(flag: Tensor, group: dist.ProcessGroup | None = None, observers: Observers = NOBODY) -> None:
    """Replace ``flag`` (0 or 1, any shape) by its maximum over the processes of ``group``, in place."""
    if dist.get_world_size(group) == 1:
        return
    for see in observers.message:
        see("all_reduce", flag, 0, "flag")
    dist.all_reduce(flag, dist.ReduceOp.MAX, group)


def by_rank(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """The values of all processes of ``group``, in the order of ranks; called on all processes."""
    if not dist.is_initialized() or dist.get_world_size(group) == 1:
        return [value]
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def check_same(facts: Mapping[str, str]) -> None:
    """Compare ``facts`` (name to value, of the model, the data or the settings) over all processes.

    Raises:
        ValueError: on every process, where two processes differ; names the facts and the ranks.
    """
    differences = _differences(by_rank(dict(facts)))
    if differences:
        raise ValueError(differences)


def _differences(gathered: Sequence[Mapping[str, str]]) -> str:
    """A sentence for each of the first ``_NAMED`` facts that differ; empty where the processes agree."""
    names = list(dict.fromkeys(name for facts in gathered for name in facts))
    # A fact that some processes lack, such as an option of another strategy, follows from another difference.
    for known in ([n for n in names if all(n in facts for facts in gathered)], names):
        found = []
        for name in known:
            processes: dict[str, list[int]] = {}
            for rank, facts in enumerate(gathered):
                processes.setdefault(facts.get(name, "missing"), []).append(rank)
            if len(processes) > 1:
                values = "; ".join(f"{value} on rank {_some(ranks)}" for value, ranks in processes.items())
                found.append(f"Processes that train one model must agree on {name}. There is {values}.")
        if found:
            return " ".join(found[:_NAMED])
    return ""


_NAMED = 5  # differences in one message
_PATIENCE = timedelta(seconds=10)  # added to the timeout of processes that wait for the first process's answer


def meet(facts: Mapping[str, str], place: str, timeout: timedelta) -> None:
    """``check_same`` through the store of the default process group, without a collective.

    Used where processes that disagree would next run different collectives, and wait for each other for ever.

    Args:
        facts: name to value, see ``check_same``.
        place: the point of the program that every process must reach, for the message.
        timeout: how long the processes wait for each other.

    Raises:
        ValueError: on every process, where two processes differ; names the facts and the ranks.
        RuntimeError: a process has not come within ``timeout``.
    """
    world, rank = dist.get_world_size(), dist.get_rank()
    if world == 1:
        return
    store = default_store()
    number = store.add(f"nemo_lowprec/meetings/{rank}", 1)
    key = f"nemo_lowprec/meeting/{number}"
    store.set(f"{key}/{rank}", json.dumps(dict(facts)))
    if rank == 0:
        here = _wait(store, [f"{key}/{other}" for other in range(world)], timeout)
        gathered = [json.loads(store.get(f"{key}/{other}")) for other in range(world) if here[other]]
        missing = [other for other in range(world) if not here[other]]
        differences = "" if missing else _differences(gathered)
        store.set(f"{key}/answer", json.dumps([differences, missing]))
        if missing or differences:  # this process, which may host the store, is about to end
            _wait(store, [f"{key}/read/{other}" for other in range(1, world) if here[other]], _PATIENCE)
    elif _wait(store, [f"{key}/answer"], timeout + _PATIENCE) == [True]:
        differences, missing = json.loads(store.get(f"{key}/answer"))
        store.set(f"{key}/read/{rank}", "")
    else:
        differences, missing = "", [0]
    if differences:
        raise ValueError(differences)
    if missing:
        raise RuntimeError(
            f"Rank {_some(missing)} has not come to {place} within {timeout.total_seconds():.0f} s. Every process must "
            "call the Trainer alike, with the same strategy and a level of nemo_lowprec."
        )


def _wait(store: dist.Store, keys: Sequence[str], timeout: timedelta) -> list[bool]:
    """For each of ``keys``, whether the key was set within ``timeout``."""
    end = time.monotonic() + timeout.total_seconds()
    found = []
    for key in keys:
        with suppress(RuntimeError):  # the error of a TCPStore is a subclass, that of a FileStore is not
            store.wait([key], timedelta(seconds=max(end - time.monotonic(), 0.01)))
        found.append(store.check([key]))
    return found


def raise_together(error: Exception | None, group: dist.ProcessGroup | None = None) -> None:
    """Raise an error of one process on all processes of ``group``, which would wait for that process for ever.

    Raises:
        Exception: the process's own error; on processes without an error, the error of the lowest rank.
    """
    errors = by_rank(error, group)
    if error is not None:
        raise error
    for found in filter(None, errors):
        raise found


def _some(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")

"""Which processes share a machine, whether GPUs use each other's memory, and the groups that average gradients.

A machine's name is the environment variable ``NCCL_HOSTID``, which NCCL uses in the same way, or else its hostname. So
several values of ``NCCL_HOSTID`` on one machine stand for several machines.
"""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from nemo_lowprec.comm.agree import by_rank
from nemo_lowprec.compat.distributed import timeout_of


def backend_of(group: dist.ProcessGroup | None, device_type: str) -> str | None:
    """Which backend serves tensors on ``device_type``: a group may have one for each, as where torch chooses them."""
    return dict(part.split(":") for part in dist.get_backend_config(group).split(",")).get(device_type)


def machines_by_rank(group: dist.ProcessGroup | None) -> list[str]:
    """The name of each process's machine, in the order of ranks; called on all processes of ``group``."""
    return by_rank(os.environ.get("NCCL_HOSTID") or socket.gethostname(), group)


def peer_access_is_off() -> bool:
    """Whether ``NCCL_P2P_DISABLE`` or ``NCCL_P2P_LEVEL`` keeps NCCL from the GPUs' access to each other's memory.

    Users set these variables where the access hangs or damages data without an error from CUDA.
    """
    return os.environ.get("NCCL_P2P_DISABLE") == "1" or os.environ.get("NCCL_P2P_LEVEL") in ("LOC", "0")


@dataclass(frozen=True)
class Machines:
    """Groups of a process, where several machines have the same number of processes each, and more than one."""

    within: dist.ProcessGroup  # the processes of this machine, in the order of ranks
    across: dist.ProcessGroup  # the processes that have this process's place on their machines, one a machine

    @classmethod
    def of(cls, group: dist.ProcessGroup | None) -> Machines | None:
        """The groups of this process; None, on all processes alike, where averaging in two levels saves nothing.

        It saves nothing with one machine or with one process a machine. Nor are there groups where machines have
        different numbers of processes, for a ``group`` without some processes of the job, or for other backends than
        NCCL and gloo. The groups are made once for each ``group``, by all processes of the job.
        """
        device = _timed_by(group)
        if device is None or dist.get_world_size(group) < max(dist.get_world_size(), 4):
            return None
        key = group or dist.group.WORLD
        assert key is not None
        if key not in _made:
            _made[key] = cls._make(group, device)
        return _made[key]

    @classmethod
    def _make(cls, group: dist.ProcessGroup | None, device: torch.device) -> Machines | None:
        ranks: dict[str, list[int]] = {}
        for rank, machine in enumerate(machines_by_rank(group)):
            ranks.setdefault(machine, []).append(dist.get_global_rank(group, rank) if group is not None else rank)
        machines = [sorted(members) for members in ranks.values()]
        sizes = {len(members) for members in machines}
        if len(machines) == 1 or len(sizes) > 1 or sizes == {1}:
            return None
        options = {"timeout": timeout_of(group, device), "backend": dist.get_backend(group)}
        within, _ = dist.new_subgroups_by_enumeration(machines, **options)
        places = [list(members) for members in zip(*machines, strict=True)]
        across, _ = dist.new_subgroups_by_enumeration(places, **options)
        return cls(within, across)


def second(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """Another process group of the processes of ``group``, made once for each ``group``, by all its processes.

    Collectives of both groups run at the same time: each group has connections of its own, and in NCCL a stream. With
    other backends than NCCL and gloo it is ``group`` itself.

    Args:
        group: None for all processes.
    """
    key = group or dist.group.WORLD
    assert key is not None
    device = _timed_by(key)
    if device is None:
        return key
    if key not in _seconds:
        _seconds[key] = dist.new_group(
            dist.get_process_group_ranks(key), timeout_of(key, device), dist.get_backend(key),
            use_local_synchronization=True,
        )  # fmt: skip
    return _seconds[key]


def _timed_by(group: dist.ProcessGroup | None) -> torch.device | None:
    """The device whose collectives give new groups their timeout; None for other backends than NCCL and gloo."""
    for device, backend in (("cuda", "nccl"), ("cpu", "gloo")):
        if backend_of(group, device) == backend:
            return torch.device(device)
    return None


_made: WeakKeyDictionary[dist.ProcessGroup, Machines | None] = WeakKeyDictionary()
_seconds: WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup] = WeakKeyDictionary()

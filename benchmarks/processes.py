"""Processes that train together, as torchrun would start them, and the machines that they take themselves for."""

from __future__ import annotations

import multiprocessing
import os
from typing import Any

__all__ = ["FORKING", "IMPORTED", "environment", "links", "put_on_machine"]

# Processes without a GPU are forked from one that has imported what takes seconds to import, and done nothing else.
FORKING = multiprocessing.get_context("forkserver")
IMPORTED = ["lightning.pytorch", "torch.distributed.fsdp", "torch.testing", "nemo_lowprec.strategies"]
FORKING.set_forkserver_preload(IMPORTED)


def environment(rank: int, world: int, port: int, machines: int = 1) -> dict[str, str]:
    """The environment variables of torchrun for one process, and of ``host`` for its machine."""
    local_world = world // machines
    numbers = {
        "RANK": rank, "LOCAL_RANK": rank % local_world, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": local_world,
        "GROUP_RANK": rank // local_world,
    }  # fmt: skip
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_RUN_ID": "test"}
    return {name: str(value) for name, value in numbers.items()} | place | host(rank // local_world, machines)


def host(machine: int, machines: int) -> dict[str, str]:
    """The variable by which NCCL and ``nemo_lowprec`` tell several machines apart; none for one machine."""
    return {"NCCL_HOSTID": f"machine {machine}"} if machines > 1 else {}


def put_on_machine(rank: int, world: int, machines: int) -> int:
    """The machine of this process, of several that NCCL and ``nemo_lowprec`` take this machine for; 0 for one."""
    machine = rank * machines // world
    os.environ.update(host(machine, machines))
    return machine


def links(machines: int) -> dict[str, Any]:
    """For a figure: the number of machines, where there are several, and NCCL's environment variables, where set."""
    settings = {name: value for name, value in sorted(os.environ.items()) if name.startswith("NCCL_")}
    settings.pop("NCCL_HOSTID", None)  # of this process alone
    return ({"machines": machines} if machines > 1 else {}) | ({"nccl": settings} if settings else {})

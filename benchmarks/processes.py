"""Processes of one machine that train together, as torchrun would start them."""

from __future__ import annotations

import multiprocessing

__all__ = ["FORKING", "IMPORTED", "environment"]

# Processes without a GPU are forked from one that has imported what takes seconds to import, and done nothing else.
FORKING = multiprocessing.get_context("forkserver")
IMPORTED = ["lightning.pytorch", "torch.distributed.fsdp", "torch.testing", "nemo_lowprec.strategies"]
FORKING.set_forkserver_preload(IMPORTED)


def environment(rank: int, world: int, port: int) -> dict[str, str]:
    """What torchrun sets for one process of a machine."""
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world, "GROUP_RANK": 0}
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_RUN_ID": "test"}
    return {name: str(value) for name, value in numbers.items()} | place

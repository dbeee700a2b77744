"""Functions run by two (or more) processes, of gloo or NCCL, as torchrun would start them."""

from __future__ import annotations

import datetime
import multiprocessing
import os
import socket
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

__all__ = ["FORKING", "environment", "free_port", "on_processes"]

SECONDS = 120
# Processes without a GPU are forked from one that has imported what takes seconds to import, and done nothing else.
FORKING = multiprocessing.get_context("forkserver")
FORKING.set_forkserver_preload(
    ["lightning.pytorch", "torch.distributed.fsdp", "torch.testing", "nemo_lowprec.strategies"]
)


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def environment(rank: int, world: int, port: int) -> dict[str, str]:
    """What torchrun sets for one process of a machine."""
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world, "GROUP_RANK": 0}
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_RUN_ID": "test"}
    return {name: str(value) for name, value in numbers.items()} | place


def on_processes(
    world: int, folder: Path, function: Callable[..., Any], *args: Any, backend: str = "gloo"
) -> list[Any]:
    """What ``function(rank, *args)`` returned on each of ``world`` processes that are in one process group.

    Lightning's Trainer finds the environment variables of torchrun there, and starts no processes of its own.
    """
    # CUDA does not survive a fork.
    method = "forkserver" if backend == "gloo" else "spawn"
    job = (world, free_port(), str(folder), backend, function, args)
    mp.start_processes(_start, job, nprocs=world, start_method=method)
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(world)]


def _start(
    rank: int, world: int, port: int, folder: str, backend: str, function: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    torch.set_num_threads(1)
    os.environ.pop("PL_GLOBAL_SEED", None)  # of an earlier test's seed_everything: strategies seed by it again
    os.environ.update(environment(rank, world, port))
    if backend == "nccl":
        with suppress(ImportError):  # before anything touches CUDA
            import transformer_engine.pytorch  # noqa: F401
        torch.cuda.set_device(rank)
    dist.init_process_group(backend, rank=rank, world_size=world, timeout=datetime.timedelta(seconds=SECONDS))
    torch.save(function(rank, *args), f"{folder}/{rank}.pt")
    dist.destroy_process_group()

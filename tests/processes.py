"""Functions run by two (or more) processes, of gloo or NCCL, as torchrun would start them."""

from __future__ import annotations

import datetime
import os
import socket
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from benchmarks.processes import FORKING, IMPORTED, environment
from nemo_lowprec.compute import gemm_times

__all__ = ["FORKING", "environment", "free_port", "of_a_shell", "on_processes"]

SECONDS = 120
# Modules that commands, arguments of levels and files of tests import, beside the benchmarks' list.
FORKING.set_forkserver_preload([
    *IMPORTED, "megatron.core", "nemo_lowprec.conf.job", "pydantic.type_adapter", "pytest", "torch._dynamo.testing",
    "transformers.models.llama.modeling_llama",
])  # fmt: skip


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def of_a_shell(**more: str) -> dict[str, str]:
    """This process's environment and ``more``, without what a Trainer of another test has left in it.

    By ``LOCAL_RANK`` a command would take itself for one of several processes, and wait for the others.
    """
    left = {
        "LOCAL_RANK",
        "RANK",
        "NODE_RANK",
        "GROUP_RANK",
        "WORLD_SIZE",
        "MASTER_ADDR",
        "MASTER_PORT",
        "PL_GLOBAL_SEED",
    }
    return {name: value for name, value in os.environ.items() if name not in left} | more


def on_processes(
    world: int, folder: Path, function: Callable[..., Any], *args: Any, backend: str = "gloo"
) -> list[Any]:
    """What ``function(rank, *args)`` returned on each of ``world`` processes that are in one process group.

    Lightning's Trainer finds the environment variables of torchrun there, and starts no processes of its own.
    """
    # CUDA does not survive a fork.
    method = "spawn" if "nccl" in backend else "forkserver"
    # Processes find each other by a file: a port that is free now may be taken when they listen on it.
    meeting = Path(tempfile.mkdtemp(dir=folder)) / "store"
    job = (world, free_port(), str(folder), meeting.as_uri(), backend, function, args)
    mp.start_processes(_start, job, nprocs=world, start_method=method)
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(world)]


def _start(
    rank: int,
    world: int,
    port: int,
    folder: str,
    meeting: str,
    backend: str,
    function: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    torch.set_num_threads(1)
    os.environ.pop("PL_GLOBAL_SEED", None)  # of an earlier test's seed_everything: strategies seed by it again
    os.environ.update(environment(rank, world, port))
    if "nccl" in backend:
        torch.cuda.set_device(rank % torch.cuda.device_count())
        gemm_times.FAMILIES = {"": None}  # small layers stay in FP8 with convert="auto"
    timeout = datetime.timedelta(seconds=SECONDS)
    dist.init_process_group(backend, init_method=meeting, rank=rank, world_size=world, timeout=timeout)
    torch.save(function(rank, *args), f"{folder}/{rank}.pt")
    dist.destroy_process_group()

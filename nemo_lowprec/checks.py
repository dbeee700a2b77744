"""Checks of a Trainer's values that Lightning takes without a word."""

from __future__ import annotations

import os
import re
from typing import Any

import torch
from lightning.fabric.plugins.environments import LightningEnvironment
from lightning.pytorch import Trainer
from lightning.pytorch.accelerators import CPUAccelerator

from nemo_lowprec.arguments import RANGES, check_value

__all__ = ["check_processes", "check_trainer"]

_PROCESSES_OF_A_CPU = 8  # whatever the number of its cores: a run on many processes can be tried out so


def check_trainer(trainer: Trainer) -> None:
    """Check what Lightning's Trainer takes without a word.

    Raises:
        ValueError: a value that means nothing, or more processes than the machine can run.
    """
    for name in ("accumulate_grad_batches", "gradient_clip_val", "log_every_n_steps"):
        kind = RANGES[name]
        check_value(name, getattr(trainer, name), kind | None if name == "gradient_clip_val" else kind)
    for name in ("max_steps", "max_epochs", "limit_train_batches"):
        if getattr(trainer, name) == 0:
            raise ValueError(f"{name}=0 trains nothing: leave it out, or set at least 1.")
    if trainer.num_nodes > 1 and isinstance(_environment(trainer), LightningEnvironment):
        there = {"MASTER_ADDR", "NODE_RANK"} & os.environ.keys()
        if not there:
            raise ValueError(
                f"num_nodes={trainer.num_nodes}: nothing says where the other machines are, and this one would wait "
                "for them. Start the run on each with torchrun, or under SLURM."
            )
    check_processes(trainer.num_devices, trainer.num_nodes, trainer.accelerator, ("devices", "num_nodes"))


def _environment(trainer: Trainer) -> Any:
    return getattr(trainer.strategy, "cluster_environment", None)


def check_processes(devices: Any, nodes: Any, accelerator: Any, names: tuple[str, str] = ("devices", "nodes")) -> None:
    """Check how many processes a run starts.

    Args:
        devices: the Trainer's argument.
        nodes: the Trainer's argument.
        accelerator: its name, or Lightning's object.
        names: of the first two in messages.

    Raises:
        ValueError: none, or more on a machine's CPU than it has a use for.
    """
    if nodes is not None:
        check_value(names[1], nodes, RANGES["num_nodes"])
    if isinstance(devices, str) and not re.fullmatch(r"auto|-1|\d+(,\d+)*,?", devices):
        raise ValueError(f"{names[0]}={devices!r} must be a number of processes, or 'auto'.")
    if devices is None or (isinstance(devices, str) and not devices.isdecimal()):
        return
    count = len(devices) if isinstance(devices, list) else int(devices)
    if count < 1 and count != -1:
        raise ValueError(f"{names[0]}={devices!r} must be at least 1.")
    on_cpu = isinstance(accelerator, CPUAccelerator) or accelerator == "cpu"
    on_cpu = on_cpu or (accelerator == "auto" and not torch.cuda.is_available())
    most = max(_PROCESSES_OF_A_CPU, os.cpu_count() or 1)
    if on_cpu and count > most:
        raise ValueError(f"{names[0]}={devices!r} is more than the {most} processes that this machine's CPU can run.")

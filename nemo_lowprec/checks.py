"""Checks of a Trainer's values that Lightning does not check."""

from __future__ import annotations

import os
import re
from typing import Any

import torch
from lightning.fabric.plugins.environments import LightningEnvironment
from lightning.pytorch import Trainer
from lightning.pytorch.accelerators import CPUAccelerator

from nemo_lowprec.arguments import RANGES, check_value

_PROCESSES_OF_A_CPU = 8  # allowed on any CPU, so that a run with many processes can be tried out


def check_trainer(trainer: Trainer) -> None:
    """Check the values of a Trainer that Lightning does not check.

    Raises:
        ValueError: a value without a meaning, or more processes than the machine can run.
    """
    for name in ("accumulate_grad_batches", "gradient_clip_val", "log_every_n_steps"):
        kind = RANGES[name]
        check_value(name, getattr(trainer, name), kind | None if name == "gradient_clip_val" else kind)
    for name in ("max_steps", "max_epochs", "limit_train_batches"):
        if getattr(trainer, name) == 0:
            raise ValueError(f"{name}=0 trains nothing: leave it out, or set at least 1.")
    environment = getattr(trainer.strategy, "cluster_environment", None)
    says_where = not isinstance(environment, LightningEnvironment) or {"MASTER_ADDR", "NODE_RANK"} & os.environ.keys()
    if trainer.num_nodes > 1 and not says_where:
        raise ValueError(
            f"num_nodes={trainer.num_nodes}: nothing says where the other machines are, and this one would wait for "
            "them. Start the run on each with torchrun, or under SLURM."
        )
    check_processes(trainer.num_devices, trainer.num_nodes, trainer.accelerator, ("devices", "num_nodes"))


def check_processes(devices: Any, nodes: Any, accelerator: Any, names: tuple[str, str] = ("devices", "nodes")) -> None:
    """Check the number of processes that a run starts.

    Args:
        devices, nodes: the Trainer's arguments.
        accelerator: the name of an accelerator, or Lightning's object.
        names: the names of ``devices`` and ``nodes`` in messages.

    Raises:
        ValueError: no process, or more processes than the machine's CPU can run.
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

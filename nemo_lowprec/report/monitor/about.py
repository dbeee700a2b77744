"""The first record of a run: what is trained, at which level, where, and by which versions."""

from __future__ import annotations

import datetime
import os
import shlex
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from nemo_lowprec.chart.options import Options
from nemo_lowprec.compute import Conversion
from nemo_lowprec.report.monitor.run_writer import FORMAT

_PLAIN = (str, int, float, bool, tuple, type(None))
_PACKAGES = (
    "nemo-lowprec", "torch", "lightning", "transformers", "transformer-engine", "megatron-core", "triton",
)  # fmt: skip


def about_run(
    model: nn.Module, options: Options, conversion: Conversion, engine: str, **further: Any
) -> dict[str, Any]:
    """The record.

    Args:
        model: as the user made it.
        options: the row and its arguments.
        conversion: how each layer is computed.
        engine: how the processes share the model: ``single``, ``ddp``, ``fsdp2`` or ``megatron``.
        further: more of the record.
    """
    recipe = options.recipe
    columns = options.level.columns(recipe is not None and recipe.fp8_params)
    params = list(model.parameters())
    cuda = torch.cuda.is_available()
    seed = os.environ.get("PL_GLOBAL_SEED")  # of Lightning's seed_everything
    return {
        "format": FORMAT,
        "time": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
        "seed": None if seed is None else int(seed),
        "level": columns.pop("Level"),
        "options": options.given,
        "arguments": {n: v if isinstance(v, _PLAIN) else repr(v) for n, v in options.chosen.items()},
        "declared": columns,
        "model": type(model).__name__,
        "parameters": sum(param.numel() for param in params),
        "engine": engine,
        "processes": dist.get_world_size() if dist.is_initialized() else 1,
        "device": torch.cuda.get_device_name() if cuda else "CPU",
        "versions": {name: found for name in _PACKAGES if (found := _version(name)) is not None},
        "command": shlex.join([_program(), *sys.argv[1:]]),
        "layers": {
            "low": conversion.low,
            "half": conversion.half,
            "left": conversion.left,
            "kept": conversion.kept,
            "fused": conversion.fused,
        },
        **further,
    }


def _program() -> str:
    """The name of what was started; ``python -m nemo_lowprec.cli`` is ``nemo-lowprec``."""
    main = sys.modules["__main__"].__spec__
    return "nemo-lowprec" if main is not None and main.name == "nemo_lowprec.cli" else Path(sys.argv[0]).name


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None

"""How each level of the chart runs here: the backend of its GEMMs, and the engines that can train it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from nemo_lowprec.compute.backends import find_backend
from nemo_lowprec.compute.backends.reference import ReferenceBackend
from nemo_lowprec.engine.build import Sharding, build, new_amaxes
from nemo_lowprec.megatron.requirements import check_device, check_megatron
from nemo_lowprec.observers import NOBODY
from nemo_lowprec.plugins import LEVELS, LowPrecision

ENGINES = ("single_device, ddp, lowprec_ddp", "lowprec_sharded", "lowprec_megatron")
_EMULATED = "reference computes FP8 in plain torch, for its numerics and not for speed"


@dataclass(frozen=True)
class LevelHere:
    """One level, with its default arguments, on this machine.

    Attributes:
        level: its name.
        backend: ``te``, ``torch`` or ``reference``; ``torch`` for GEMMs in half precision; None where none runs.
        note: why a faster backend, or none, runs here; empty for the fastest.
        engines: for each of ``ENGINES`` why it cannot train the level here; empty where it can.
    """

    level: str
    backend: str | None
    note: str
    engines: dict[str, str]


def levels_here() -> list[LevelHere]:
    """Every level of the chart, on the current GPU, or on the CPU of a machine without one."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return [_level_on(device, name, make()) for name, make in LEVELS.items()]


def _level_on(device: torch.device, name: str, plugin: LowPrecision) -> LevelHere:
    engine, recipe = plugin.engine, plugin.parsed.recipe
    backend, note = None, ""
    try:
        engine.columns.computation.check_device(device)
        found, reasons = find_backend("auto", recipe, device)
        backend = "torch" if recipe is None else found.name
        if recipe is not None and type(found) is ReferenceBackend:  # the other backends are subclasses
            note = "; ".join([*reasons, _EMULATED])
    except ValueError as error:
        note = str(error)
    sharded = note if backend is None else _sharded(plugin)
    problems = ("" if backend is not None else note, sharded, _megatron(plugin))
    return LevelHere(name, backend, note, dict(zip(ENGINES, problems, strict=True)))


def _sharded(plugin: LowPrecision) -> str:
    engine = plugin.engine
    try:
        build(engine.options, Sharding(None, None), new_amaxes(engine.recipe), engine.reads_as, NOBODY)
    except ValueError as error:
        return str(error)
    return ""


def _megatron(plugin: LowPrecision) -> str:
    try:
        check_megatron()
        plugin.megatron()
        check_device(plugin.level)
    except (RuntimeError, ValueError) as error:
        return str(error)
    return ""

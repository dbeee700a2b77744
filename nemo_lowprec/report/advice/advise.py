"""``advise``: which level a model should take, from one batch and without training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import nn

from nemo_lowprec.chart import CHART
from nemo_lowprec.compute import choose_backend
from nemo_lowprec.compute.gemm_times import times_of
from nemo_lowprec.lines import bytes_text
from nemo_lowprec.plugins import LowPrecision
from nemo_lowprec.report.advice.advice import Advice, LevelAdvice
from nemo_lowprec.report.advice.layers import KeptBack, kept_back, lowest
from nemo_lowprec.report.advice.measuring import measure_level, time_plain
from nemo_lowprec.report.advice.operands import SCALINGS, way_of
from nemo_lowprec.report.advice.passes import Seen, device_of, look, on_copy, on_device, random_states_kept, without_log
from nemo_lowprec.report.advice.paste import modules_of, patterns_of
from nemo_lowprec.report.advice.times import StepTimes
from nemo_lowprec.report.plan.choices import PlanChoice
from nemo_lowprec.report.plan.gpu_memory import memory_here, memory_of
from nemo_lowprec.report.plan.plan import plan_training


def advise(
    model: nn.Module,
    batch: Any,
    levels: Sequence[str | LowPrecision] | None = None,
    *,
    gpu_memory: float | str | None = None,
) -> Advice:
    """Tell which level fits a GPU, how long a step takes at each level, and which layers FP8 would serve badly.

    Nothing is trained: passes run on copies, and neither the model nor its gradients, its mode or random states change.
    ``plan_training`` gives the memory on one GPU; the bytes that measured steps take beyond their plan are added. One
    forward and backward pass of ``batch`` gives the operands, and the reference definitions give the errors
    (``report/advice/operands.py``). Times need a GPU: ``report/advice/times.py`` computes times from two short
    measurements.

    Args:
        model: a LightningModule, a model of transformers, or any module whose forward pass returns the loss; not
            converted. Without values (on torch's meta device) there is a plan, and nothing else.
        batch: the argument of ``training_step``. Of a module without a ``training_step``: the argument of its forward
            pass, or a tuple or a dict of arguments. Tensors on any device.
        levels: levels by their names, or as plugins, which may have options. None for all that can run here.
        gpu_memory: GiB of the GPU, or ``H100`` or ``H200``; None for that of this machine.

    Returns:
        The advice; ``print`` shows it, ``best`` is the recommended level with the line to paste.

    Raises:
        ValueError: an unknown level, a bad ``gpu_memory``, a model that is converted already, has no parameters, or
            computes no loss; or every level refuses the model.
    """
    memory = memory_here() if gpu_memory is None else memory_of(gpu_memory)
    device = device_of(model)
    plugins = [one if isinstance(one, LowPrecision) else LowPrecision(one) for one in levels or levels_here(device)]
    precisions = {repr(plugin).removesuffix("()"): plugin for plugin in plugins}
    with random_states_kept(device), without_log():
        choices, refused = _plans(model, batch, precisions, memory, device)
        seen, notes = _look(model, batch, device, precisions)
        kept = {} if seen is None else {way: kept_back(seen.errors, way) for way in seen.ways}
        layers = {name: _layers(kept, precisions[name]) for name in choices}
        measured = _measure(model, batch, device, seen, choices, precisions, layers)
    found = []
    for name, choice in choices.items():
        choice = replace(choice, beyond=measured.beyond)
        skip = [] if seen is None else patterns_of(modules_of(model, layers[name]), modules_of(model, seen.layers))
        share = len(layers[name]) / len(seen.layers) if layers[name] and seen is not None else 0.0
        options = precisions[name].parsed.chosen
        found.append(LevelAdvice(choice, options, tuple(layers[name]), tuple(skip), share, measured.ms.get(name)))
    sqnr = {} if seen is None else {way: lowest(seen.errors, way) for way in seen.ways}
    return Advice.of(found, kept_back=kept, sqnr=sqnr, notes=(*notes, *measured.notes), refused=refused)


def levels_here(device: torch.device) -> list[str]:
    """The names of the levels that can run on a device. Levels that need Blackwell are emulated on no other device."""
    found = []
    for level in CHART:
        parsed = LowPrecision(level).parsed
        with without_log(), suppress(ValueError):
            choose_backend(parsed.backend, parsed.recipe, device)
            found.append(level)
    return found


def _plans(
    model: nn.Module, batch: Any, precisions: dict[str, LowPrecision], memory: int | None, device: torch.device
) -> tuple[dict[str, PlanChoice], dict[str, str]]:
    """The plans of the levels on one GPU, and for each level that refuses the model its sentence."""
    choices: dict[str, PlanChoice] = {}
    refused: dict[str, str] = {}
    failed: Exception | None = None
    for name, precision in precisions.items():
        try:
            if not _is_empty(model):
                for column in precision.engine.columns:
                    column.check(model, device, True)
            choices[name] = PlanChoice(name, plan_training(model, precision, batch=batch, both_choices=False), memory)
        except ValueError as error:
            failed = failed or error
            refused[name] = str(error)
    if failed is not None and not choices:
        raise failed
    return choices, refused


def _is_empty(model: nn.Module) -> bool:
    """Whether weights have no values."""
    return any(p.is_meta for p in model.parameters())


def _look(
    model: nn.Module, batch: Any, device: torch.device, precisions: dict[str, LowPrecision]
) -> tuple[Seen | None, list[str]]:
    """The findings of a pass of the batch, and a sentence where no pass is possible."""
    if _is_empty(model):
        return None, ["The model's weights have no values here: neither SQNR nor times."]
    recipes = [precision.parsed.recipe for precision in precisions.values()]
    ways = {way_of(recipe): recipe for recipe in recipes if recipe is not None and recipe.scaling in SCALINGS}
    batch = on_device(batch, device)
    seen = on_copy(model, device, lambda copy: look(copy, batch, ways))
    if seen is None:
        return None, ["A pass of this batch needs more memory than the GPU has: neither SQNR nor times."]
    return seen, []


class _Measured(NamedTuple):
    """The outcome of the measurements on the GPU.

    Attributes:
        ms: of a step, by level.
        notes: sentences about what was measured.
        beyond: bytes of a step that its plan does not count.
    """

    ms: dict[str, float]
    notes: list[str]
    beyond: int = 0


def _measure(
    model: nn.Module,
    batch: Any,
    device: torch.device,
    seen: Seen | None,
    choices: dict[str, PlanChoice],
    precisions: dict[str, LowPrecision],
    layers: dict[str, list[str]],
) -> _Measured:
    """Measure two levels, from which the times of all follow, each with its ``layers`` kept back."""
    if seen is None:
        return _Measured({}, [])
    times = times_of(device)
    if times is None:
        which = "There is no GPU" if device.type == "cpu" else "Nobody knows the GEMM times of this GPU"
        return _Measured({}, [f"{which}: no times of a step."])
    parts, batch = StepTimes(times, seen, device), on_device(batch, device)
    plain = on_copy(model, device, lambda copy: time_plain(copy, batch))
    if plain is None:
        return _Measured({}, ["A pass in BF16 needs more memory than the GPU has: no times of a step."])
    rest, beyond, said = parts.rest(plain), 0, f"{plain / 1e3:,.1f} ms forward and backward in BF16"
    with_fp8 = [name for name in choices if precisions[name].parsed.recipe is not None]
    if with_fp8:
        name = min(with_fp8, key=lambda name: choices[name].plan.total)
        precision, plan = precisions[name], choices[name].plan
        step = on_copy(model, device, lambda copy: measure_level(copy, batch, precision.parsed))
        if step is None:
            said += f"; a step at {name} needs more memory than the GPU has, and FP8 levels may be faster than this"
        else:
            rest = parts.rest(plain, step.us, precision.parsed, plan)
            beyond = max(0, step.peak - plan.total)
            said += f", {step.us / 1e3:,.1f} ms a step at {name}"
            said += f", which takes {bytes_text(beyond)} beyond its plan" if beyond else ""
    expected = {
        name: parts.step(precisions[name].parsed, choice.plan, rest, layers[name]) / 1e3
        for name, choice in choices.items()
    }
    how = "measured" if times.measured else "by its roofline"
    return _Measured(
        expected, [f"Measured: {said}. Others by GEMM and quantization times of {times.family} ({how})."], beyond
    )


def _layers(kept: Mapping[str, list[KeptBack]], precision: LowPrecision) -> list[str]:
    """The layers that a level should keep back.

    Args:
        kept: way of scaling to the layers to keep back under it.
    """
    recipe = precision.parsed.recipe
    return [] if recipe is None else [one.layer for one in kept.get(way_of(recipe), [])]

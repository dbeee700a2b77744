"""Times of a model's GEMMs on this GPU, in half precision and in FP8 with quantization."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn

from nemo_lowprec.compute import gemm_plans
from nemo_lowprec.compute.backends import Backend, find_backend
from nemo_lowprec.compute.backends.reference import ReferenceBackend
from nemo_lowprec.compute.gemm_measure import layer_times, warm_operands
from nemo_lowprec.compute.speed_filter import Calls
from nemo_lowprec.plugins import LowPrecision
from nemo_lowprec.report.plan.activations import Sample, run_of
from nemo_lowprec.report.plan.on_gpu import GpuRules
from nemo_lowprec.report.plan.on_meta import copy_on_meta, settle_on_meta
from nemo_lowprec.report.plan.tracing import trace


@dataclass(frozen=True)
class GemmTime:
    """The layers of one shape, [rows, ins] to [rows, outs].

    Attributes:
        layers: how many of the model's converted layers have this shape.
        rows: tokens of a micro-batch.
        ins, outs: features.
        fp8: µs of fprop, dgrad and wgrad of one layer in FP8, with quantization; None where nothing was measured.
        half: µs of the three GEMMs in half precision; None where nothing was measured.
    """

    layers: int
    rows: int
    ins: int
    outs: int
    fp8: float | None = None
    half: float | None = None

    @property
    def ratio(self) -> float | None:
        """Time in FP8 over time in half precision."""
        return self.fp8 / self.half if self.fp8 is not None and self.half else None


@dataclass(frozen=True)
class GemmReport:
    """All GEMMs of a model that a level converts.

    Attributes:
        level: name of the level.
        half: the level's half format.
        sample: the micro-batch, for people.
        backend: that has run the FP8 GEMMs; None where nothing was measured.
        why: why nothing was measured; empty where times were.
        times: by shape, those with most FLOP first.
    """

    level: str
    half: str
    sample: str
    backend: str | None
    why: str
    times: tuple[GemmTime, ...]

    @property
    def ratio(self) -> float | None:
        """Time of all layers in FP8 over their time in half precision; None where nothing was measured."""
        fp8 = sum(t.layers * (t.fp8 or 0.0) for t in self.times)
        half = sum(t.layers * (t.half or 0.0) for t in self.times)
        return fp8 / half if half else None


def time_gemms(model: nn.Module, precision: LowPrecision, sample: Sample) -> GemmReport:
    """Measure the GEMMs that ``precision`` converts in ``model``, on the current GPU.

    Args:
        model: any module with its parameters, on whatever device (torch's meta device takes no memory); not changed.
        precision: the level.
        sample: the micro-batch, which gives the rows.

    Raises:
        ValueError: the level has no FP8 GEMMs, or they cannot run on this GPU; the sample does not fit the model.
    """
    level, recipe = precision.level, precision.parsed.recipe
    if recipe is None:
        raise ValueError(f"{level.name} has no FP8 GEMMs to be measured. Choose a level such as bf16_with_fp8_mixed.")
    shapes = [GemmTime(layers, *shape) for shape, layers in _shapes(model, precision, sample).items()]
    shapes.sort(key=lambda t: t.layers * t.rows * t.ins * t.outs, reverse=True)
    name, why = None, "torch finds no NVIDIA GPU on this machine"
    if torch.cuda.is_available():
        backend, reasons = find_backend(precision.parsed.backend, recipe, torch.device("cuda"))
        if type(backend) is ReferenceBackend:
            why = "; ".join(reasons) or "backend='reference' emulates FP8"
        else:
            name, why, shapes = backend.name, "", list(_measured(shapes, precision, backend))
    return GemmReport(level.name, level.autocast, str(sample), name, why, tuple(shapes))


def _measured(shapes: list[GemmTime], precision: LowPrecision, backend: Backend) -> Iterator[GemmTime]:
    recipe = precision.parsed.recipe
    assert recipe is not None
    operands = warm_operands(recipe)
    for t in shapes:
        rows = -(-t.rows // backend.row_multiple) * backend.row_multiple  # layers pad them
        fp8, half = layer_times(rows, t.ins, t.outs, backend, operands, precision.dtype)
        torch.cuda.empty_cache()
        yield GemmTime(t.layers, t.rows, t.ins, t.outs, fp8, half)


def _shapes(model: nn.Module, precision: LowPrecision, sample: Sample) -> dict[tuple[int, int, int], int]:
    """The number of converted layers by (rows, ins, outs), from one pass on fake tensors."""
    run = run_of(model, sample)
    if isinstance(run, str):
        raise ValueError(f"The shapes of the GEMMs are not known: {run}.")
    twin = copy_on_meta(model)
    engine = settle_on_meta(twin, precision.engine, sharded=False, on_gpu=True)
    calls = Calls()
    for plan in (plan for module in twin.modules() for plan in gemm_plans(module).values()):
        if plan.recipe is not None:
            plan.calls = calls
    trace(twin, run, engine.half, None, [], 1, GpuRules())
    calls.close()
    layers: dict[tuple[int, int, int], set[str]] = {}
    for call in (call for group, _ in calls.groups for call in group):
        layers.setdefault((call.rows, call.ins, call.outs), set()).add(call.name)
    return {shape: len(names) for shape, names in layers.items()}

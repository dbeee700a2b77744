"""From traces to the profile of a step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import nn

from nemo_lowprec.compat.profiler import Event
from nemo_lowprec.compute import Conversion, gemm_plans
from nemo_lowprec.report.profile.layers import Kernel, kernels_of, operations_of
from nemo_lowprec.report.profile.step_profile import StepProfile
from nemo_lowprec.report.profile.timeline import WAITS, Shares, matched, shares_of, sums_of

__all__ = ["Traced", "of_cpu", "of_gpu", "step_profile"]


class Traced(NamedTuple):
    """The parts of the time of traced steps.

    Attributes:
        shares: of all traced steps.
        steps: their number.
        matched: the share of the time whose layers are known.
        is_whole: whether the times are those of the run itself. The profiler slows the operations of a CPU.
    """

    shares: Shares
    steps: int
    matched: float
    is_whole: bool


def of_gpu(kernels: Sequence[Kernel], ranged: Sequence[Event], steps: int) -> Traced:
    """The parts of ``steps`` steps that ran as ever.

    Args:
        kernels: of these steps, without layers.
        ranged: the trace of one step without CUDA graphs, with ranges of layers.
        steps: see above.
    """
    found, share = matched(kernels, kernels_of(ranged), steps)
    return Traced(shares_of(found), steps, share, is_whole=True)


def of_cpu(ranged: Sequence[Event]) -> Traced:
    """The parts of one step with ranges of layers."""
    return Traced(sums_of(operations_of(ranged)), 1, 1.0, is_whole=False)


def step_profile(
    about: dict[str, Any], model: nn.Module, conversion: Conversion, seconds: float, traced: Traced
) -> StepProfile:
    """The profile of a step.

    Args:
        about: the run.
        model: as the user made it.
        conversion: how each layer is computed.
        seconds: of a step, without a profiler.
        traced: the parts of its time.
    """
    of_step = {place: ns / traced.steps for place, ns in traced.shares.ns.items()}
    busy = sum(ns for (_, kind), ns in of_step.items() if kind != WAITS)
    waits = sum(ns for (_, kind), ns in of_step.items() if kind == WAITS)
    # The profiler slows the host: of the waits, and of a CPU's operations, the shares are right. Their sum is what the
    # step takes beyond the kernels.
    rest = max(0.0, seconds * 1e9 - busy)
    work = 1.0 if traced.is_whole else min(1.0, seconds * 1e9 / busy)
    layers: dict[str, dict[str, float]] = {}
    for (layer, kind), ns in of_step.items():
        scale = work if kind != WAITS else rest / waits
        layers.setdefault(layer, {})[kind] = round(ns / 1e3 * scale, 3)
    if not waits:
        layers.setdefault("", {})[WAITS] = round(rest / 1e3, 3)
    linears, low, groups = _linears(model, conversion)
    return StepProfile(
        about=about, ms=round(seconds * 1e3, 4), layers=layers,
        launches={layer: count / traced.steps for layer, count in traced.shares.launches.items()},
        linears=linears, low=low, groups=groups, matched=round(traced.matched, 4),
    )  # fmt: skip


def _linears(model: nn.Module, conversion: Conversion) -> tuple[list[str], list[str], list[list[str]]]:
    """Names of the linear layers, of those whose GEMMs run in FP8, and of those that compute as one."""
    converted = {*conversion.low, *conversion.half}
    names = [n for n, module in model.named_modules() if n in converted or isinstance(module, nn.Linear)]
    in_fp8 = set(conversion.low) - set(conversion.left)
    low = [name for name in names if name in in_fp8]
    groups: dict[int, list[str]] = {}
    for module in model.modules():
        for plan in gemm_plans(module).values():
            if plan.group is not None:
                groups[id(plan.group)] = [one.name for one in plan.group.plans]
    return names, low, list(groups.values())

"""A profile beside the profile of the same model in BF16: where the time went, layer by layer."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from nemo_lowprec.report.profile.step_profile import PARTS, StepProfile
from nemo_lowprec.report.profile.timeline import WAITS

__all__ = ["Beside", "LayerTimes", "beside"]

_SLOWER = 1.02  # times BF16's time; below it a difference may be noise
_LEAST_US = 2.0  # that a layer must lose


@dataclass(frozen=True)
class LayerTimes:
    """Times of a layer in a step, or of layers that one run computes as one.

    Attributes:
        name: of the layer; of several ``mlp.{gate_proj,up_proj}``, or of the module that holds all.
        low: names of its linear layers whose GEMMs run in FP8 at the level.
        half_us, low_us: µs of a step by part, in BF16 and at the level. Waits are left out.
    """

    name: str
    low: tuple[str, ...]
    half_us: dict[str, float]
    low_us: dict[str, float]

    @property
    def half(self) -> float:
        """µs in BF16."""
        return sum(self.half_us.values())

    @property
    def at_level(self) -> float:
        """µs at the level."""
        return sum(self.low_us.values())

    @property
    def is_better_in_half(self) -> bool:
        """Whether the layer runs in FP8, and BF16 takes less time."""
        return bool(self.low) and self.at_level > max(self.half * _SLOWER, self.half + _LEAST_US)


@dataclass(frozen=True)
class Beside:
    """Two profiles of a model.

    Attributes:
        half: in BF16.
        low: at the level.
        layers: in the order of the model; first the kernels without a layer.
    """

    half: StepProfile
    low: StepProfile
    layers: list[LayerTimes]

    @property
    def better_in_half(self) -> list[LayerTimes]:
        """The kinds of layers that BF16 computes in less time; the one that loses most is first."""
        slower = (one for one in self.kinds_of_layers() if one.is_better_in_half)
        return sorted(slower, key=lambda one: one.half - one.at_level)

    def kinds_of_layers(self) -> list[LayerTimes]:
        """Layers of the same name in all blocks as one, the largest in BF16 first."""
        found: dict[str, list[LayerTimes]] = {}
        for one in self.layers:
            found.setdefault(re.sub(r"(?<=\.)\d+(?=\.|$)", "*", one.name), []).append(one)
        alike = [
            LayerTimes(
                name, tuple(low for one in of for low in one.low), _sums(one.half_us for one in of),
                _sums(one.low_us for one in of),
            )
            for name, of in found.items()
        ]  # fmt: skip
        return sorted(alike, key=lambda one: -one.half)


def beside(half: StepProfile, low: StepProfile) -> Beside:
    """Compare two profiles of one model.

    Args:
        half: in BF16.
        low: at a level.

    Raises:
        ValueError: the profiles are of different models, processes or devices.
    """
    for key in ("model", "parameters", "processes", "device"):
        if half.about[key] != low.about[key]:
            raise ValueError(
                f"The profiles are of different runs: {key} is {half.about[key]} in BF16, and {low.about[key]} at "
                f"{low.about['level']}."
            )
    names = dict.fromkeys([*half.layers, *low.layers])
    units = _units(list(names), half, low)
    layers = []
    for unit, members in units.items():
        found = [_sums(_kernels(profile, member) for member in members) for profile in (half, low)]
        layers.append(LayerTimes(unit, tuple(name for name in low.low if name in set(members)), *found))
    return Beside(half, low, layers)


def _units(names: list[str], half: StepProfile, low: StepProfile) -> dict[str, list[str]]:
    """Names of layers by the units that both runs compute apart.

    A layer whose GEMMs another one computes in one of the runs has no time of its own there: the layers of the group
    become one unit, and where the group's parent computes them all, the parent with all that it holds.
    """
    linears = {*half.linears, *low.linears}
    groups = [group for profile in (half, low) for group in profile.groups]
    wholes = [group for group in groups if _is_known(group, half, low)]
    within = {name: _group_name(group) for group in wholes for name in group}
    parents = set()
    for name in names:
        if name in linears and name not in within and not _is_known([name], half, low):
            parents.add(name.rpartition(".")[0])
    units: dict[str, list[str]] = {}
    for name in names:
        whole = next((parent for parent in sorted(parents, key=len) if f"{name}.".startswith(f"{parent}.")), None)
        units.setdefault(whole or within.get(name, name), []).append(name)
    return units


def _is_known(names: Iterable[str], half: StepProfile, low: StepProfile) -> bool:
    """Whether both runs, or neither, have spent time in the GEMMs of layers."""
    names = list(names)
    times = [sum(profile.layers.get(name, {}).get("gemm", 0.0) for name in names) for profile in (half, low)]
    return all(times) or not any(times)


def _group_name(group: Sequence[str]) -> str:
    parent = group[0].rpartition(".")[0]
    return f"{parent}.{{{','.join(name.rpartition('.')[2] for name in group)}}}"


def _kernels(profile: StepProfile, name: str) -> dict[str, float]:
    return {part: us for part, us in profile.layers.get(name, {}).items() if part != WAITS}


def _sums(parts: Iterable[dict[str, float]]) -> dict[str, float]:
    total: dict[str, float] = {}
    for one in parts:
        for part, us in one.items():
            total[part] = total.get(part, 0.0) + us
    return {part: total[part] for part in PARTS if part in total}

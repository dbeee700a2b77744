"""Losses and gains of each level of a comparison beside the reference."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

import numpy as np

from nemo_lowprec.report.compare.groups import Group
from nemo_lowprec.report.compare.intervals import half_width
from nemo_lowprec.report.curves import Numbers, smoothed
from nemo_lowprec.report.monitor.runs import Run

_LAST = 10  # a final training loss is the mean over the last tenth of the steps
_NEAR = 3  # samples from the step at which a level leaves the band


@dataclass
class Fall:
    """The operand of a layer whose SQNR has fallen most.

    Attributes:
        layer, operand: of the model.
        before: its median SQNR before the step, in dB.
        after: its median over the three samples from that step on; above ``before`` where no SQNR has fallen.
    """

    layer: str
    operand: str
    before: float
    after: float


@dataclass
class Outcome:
    """The figures of one group of runs.

    Attributes:
        group: the runs.
        steps: that all runs of the group and of the reference share.
        losses: smoothed, [seeds, steps].
        gaps: smoothed loss minus the reference's, [pairs of seeds, steps]; None for the reference.
        final: validation loss, or training loss over the last tenth of the steps, the mean over the seeds; None where
            the loss has become infinite or NaN.
        gap: ``final`` minus the reference's; None for the reference.
        gap_half: half the width of its 95 % interval; None with fewer than two pairs.
        nonfinite_from: the first step whose loss is infinite or NaN, in any of the runs.
        leaves: the step from which the mean lies outside the reference's band; None where it stays.
        fall: of the layer that has lost most SQNR there; None where the level stays, or no SQNR is known.
        tokens_per_second: the median of a run, the mean over the runs.
        peak_bytes: of the GPU, the largest of the runs.
        bytes_per_param: stored for weights, gradients and optimizer states on one process.
    """

    group: Group
    steps: list[int]
    losses: Numbers
    gaps: Numbers | None = None
    final: float | None = None
    gap: float | None = None
    gap_half: float | None = None
    nonfinite_from: int | None = None
    leaves: int | None = None
    fall: Fall | None = None
    tokens_per_second: float | None = None
    peak_bytes: int | None = None
    bytes_per_param: float | None = None


@dataclass
class Comparison:
    """Several levels beside the first of them.

    Attributes:
        outcomes: one for each level, that of the reference first.
        by_validation: whether ``final`` is the validation loss, which all runs have at the same step.
        band: whether the reference has two seeds or more, and so a band.
    """

    outcomes: list[Outcome]
    by_validation: bool
    band: bool


def compare(groups: Sequence[Group]) -> Comparison:
    """Compare groups of runs with the first one."""
    reference = groups[0]
    everything = [run for group in groups for run in group.runs]
    by_validation = len({_validation(run)[0] for run in everything}) == 1 and _validation(everything[0])[0] > 0
    known = _steps(reference.runs)
    outcomes = []
    for group in groups:
        steps = [step for step in _steps(group.runs) if step in set(known)]
        if not steps:
            raise ValueError(f"The runs of {group.label} and of {reference.label} have no step in common.")
        found = Outcome(group, steps, smoothed(_losses(group.runs, steps)))
        _add_losses(found, reference, by_validation)
        _add_costs(found)
        outcomes.append(found)
    return Comparison(outcomes, by_validation, len(reference.runs) > 1)


def pairs(group: Group, reference: Group) -> list[tuple[int, int]]:
    """Index pairs of runs to be compared: runs of one seed; runs in their order where no seed is in both groups."""
    places = {seed: index for index, seed in enumerate(reference.seeds) if seed is not None}
    same = [(index, places[seed]) for index, seed in enumerate(group.seeds) if seed in places]
    return same or [(index, index) for index in range(min(len(group.runs), len(reference.runs)))]


def _add_losses(found: Outcome, reference: Group, by_validation: bool) -> None:
    group, steps = found.group, found.steps
    found.nonfinite_from = min((s for run in group.runs if (s := run.nonfinite_from) is not None), default=None)
    # A run may have ended early: the reference's loss is that of the same steps.
    finals, others = (_finals(runs, steps, by_validation) for runs in (group.runs, reference.runs))
    if found.nonfinite_from is None:
        found.final = float(finals.mean())
    if group is reference:
        return
    paired = pairs(group, reference)
    of_group, of_reference = (list(indices) for indices in zip(*paired, strict=True))
    band = smoothed(_losses(reference.runs, steps))
    found.gaps = found.losses[of_group] - band[of_reference]
    if found.nonfinite_from is None:
        differences = finals[of_group] - others[of_reference]
        found.gap = float(differences.mean())
        found.gap_half = float(half_width(differences)) if len(paired) > 1 else None
    if len(reference.runs) > 1:
        found.leaves = _leaves(found, band)
    if found.leaves is not None:
        found.fall = _fall(group.runs, found.leaves)


def _add_costs(found: Outcome) -> None:
    runs = found.group.runs
    rates = [rate for run in runs if (rate := run.tokens_per_second) is not None]
    if len(rates) == len(runs):
        found.tokens_per_second = fmean(rates)
    found.peak_bytes = max((run.peak_bytes for run in runs if run.peak_bytes is not None), default=None)
    audits = [run.audit["total_bytes"] for run in runs if run.audit is not None]
    if audits:
        stored = sum(total for column, total in audits[0].items() if column != "Comm")
        found.bytes_per_param = stored / runs[0].about["parameters"]


def _steps(runs: Sequence[Run]) -> list[int]:
    return sorted(set.intersection(*(set(run.loss) for run in runs)))


def _losses(runs: Sequence[Run], steps: Sequence[int]) -> Numbers:
    return np.array([[run.loss[step] for step in steps] for run in runs])


def _validation(run: Run) -> tuple[int, float]:
    """The step and the loss of the last validation; step 0 where there is none."""
    return run.val_losses[-1] if run.val_losses else (0, 0.0)


def _finals(runs: Sequence[Run], steps: Sequence[int], by_validation: bool) -> Numbers:
    if by_validation:
        return np.array([_validation(run)[1] for run in runs])
    return _losses(runs, steps[-max(1, len(steps) // _LAST) :]).mean(axis=1)


def _leaves(found: Outcome, band: Numbers) -> int | None:
    """The step from which the mean is outside the reference's band until the end, for a tenth of the run or longer."""
    mean = found.losses.mean(axis=0)
    outside = (mean < band.min(axis=0)) | (mean > band.max(axis=0))
    inside = np.flatnonzero(~outside)
    first = int(inside[-1]) + 1 if len(inside) else 0
    return found.steps[first] if len(found.steps) - first >= max(1, len(found.steps) // _LAST) else None


def _fall(runs: Sequence[Run], step: int) -> Fall | None:
    """Over all runs, the operand whose SQNR near the step lies farthest below its median before."""
    falls: dict[tuple[str, ...], list[tuple[float, float]]] = {}
    for run in runs:
        first = int(np.searchsorted(run.steps, step))
        if "sqnr" not in run.operands.metrics or not 0 < first < len(run.steps):
            continue
        numbers = run.operands.matrix("sqnr")
        for row, values in zip(run.operands.rows, numbers, strict=True):
            before, after = values[:first], values[first : first + _NEAR]
            if np.isfinite(before).any() and np.isfinite(after).any():
                falls.setdefault(row, []).append((float(np.nanmedian(before)), float(np.nanmedian(after))))
    means = {row: (fmean(b for b, _ in found), fmean(a for _, a in found)) for row, found in falls.items()}
    if not means:
        return None
    (layer, operand), (before, after) = max(means.items(), key=lambda item: item[1][0] - item[1][1])
    return Fall(layer, operand, before, after)

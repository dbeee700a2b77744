"""Gaps of final losses with their confidence intervals; docs/convergence.rst has the protocol."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from scipy import stats

from benchmarks.convergence_run import STEPS, Spec

__all__ = [
    "BASELINE",
    "ENOUGH",
    "TWIN",
    "Chance",
    "Gap",
    "chance_by_length",
    "change_over",
    "gaps_at_length",
    "percent",
]

BASELINE = "bf16_mixed"
TWIN = f"{BASELINE}+twin"  # row of the baseline's second run
ENOUGH = 4  # degrees of freedom of a standard deviation that intervals are made of
_SURE = 0.975  # quantile at each end of an interval of 95 %
_DRAWS = 4096  # of the bootstrap
Runs = Mapping[Spec, Mapping[str, Any]]


@dataclass(frozen=True)
class Gap:
    """How far the loss of a row lies above the baseline's, in percent of the baseline's loss.

    Attributes:
        percent: mean over seeds, at the end.
        half: half the width of its interval of 95 %.
        later: mean gap of the validations of the second half of the training.
        change: growth of the gap over the second half of the training, in points.
        change_half: half the width of the interval of ``change``.
    """

    percent: float
    half: float
    later: float
    change: float
    change_half: float


@dataclass(frozen=True)
class Chance:
    """How far the gap of a pair of runs varies when nothing but chance differs, from runs of one length.

    Attributes:
        deviation: standard deviation of one pair's gap, in percent; NaN without a degree of freedom.
        freedom: degrees of freedom of ``deviation``.
        runs: number of runs.
        twins: gap of the baseline's second run in percent, by seed.
    """

    deviation: float
    freedom: int
    runs: int
    twins: dict[int, float]


def percent(loss: float, base: float) -> float:
    """How far ``loss`` lies above ``base``, in percent of ``base``."""
    return 100 * (loss / base - 1)


def chance_by_length(runs: Runs) -> dict[int, Chance]:
    """The chance of runs that ended, by their number of steps in rising order."""
    lengths: dict[int, dict[Spec, float]] = defaultdict(dict)
    for spec, run in runs.items():
        if spec.stop == spec.steps:
            lengths[spec.steps][spec] = run["loss"]
    return {steps: _chance(lengths[steps]) for steps in sorted(lengths)}


def _chance(losses: Mapping[Spec, float]) -> Chance:
    """What is left of the logarithms of the losses after an effect of the row and one of the seed.

    A twin has the baseline's row. The gap of a pair is a difference of two runs: twice the variance of one.
    """
    rows = {spec: BASELINE if spec.row == TWIN else spec.row for spec in losses}
    names, seeds = sorted(set(rows.values())), sorted({spec.seed for spec in losses})
    effects = np.array(
        [[*(row == of for of in names), *(spec.seed == of for of in seeds)] for spec, row in rows.items()],
        dtype=np.float64,
    )
    logarithms = 100 * np.log(list(losses.values()))
    solution, _, rank, _ = np.linalg.lstsq(effects, logarithms, rcond=None)
    left = logarithms - effects @ solution
    freedom = len(losses) - int(rank)
    twins = {
        spec.seed: percent(loss, losses[base])
        for spec, loss in losses.items()
        if spec.row == TWIN and (base := replace(spec, variant="")) in losses
    }
    deviation = (2 * float(left @ left) / freedom) ** 0.5 if freedom else float("nan")
    return Chance(deviation, freedom, len(losses), twins)


def text_error(run: Sequence[float], base: Sequence[float]) -> float:
    """Standard error of a gap in percent, as the validation text is a sample: a paired bootstrap over its blocks.

    Args:
        run: mean loss of each block.
        base: of the same blocks, by the baseline.
    """
    losses = np.array([run, base], dtype=np.float64)
    drawn = np.random.default_rng(0).integers(losses.shape[1], size=(_DRAWS, losses.shape[1]))
    means = losses[:, drawn].mean(2)
    return float((100 * (means[0] / means[1] - 1)).std(ddof=1))


def change_over(steps: Sequence[int], gaps: Sequence[float]) -> tuple[float, float]:
    """The rise of a straight line through ``gaps`` from the first step to the last, and half its interval's width."""
    line = stats.linregress(steps, gaps)
    span = steps[-1] - steps[0]
    sure = stats.t.ppf(_SURE, len(steps) - 2)
    return float(line.slope * span), float(sure * line.stderr * span)


def gaps_at_length(runs: Runs) -> dict[str, Gap]:
    """The gap of each ``Spec.row`` that has a whole run beside the baseline's of the same seed, in order of ``runs``.

    The interval of a gap is made of the chance of the longest runs with at least ``ENOUGH`` degrees of freedom.
    """
    chance = [of for of in chance_by_length(runs).values() if of.freedom >= ENOUGH][-1]
    sure = float(stats.t.ppf(_SURE, chance.freedom))
    pairs: dict[str, list[tuple[Mapping[str, Any], Mapping[str, Any]]]] = defaultdict(list)
    for spec, run in runs.items():
        base = runs.get(Spec(BASELINE, "", spec.seed, STEPS, STEPS))
        if spec.is_whole and base is not None and base is not run:
            pairs[spec.row].append((run, base))
    found = {}
    for row, of in pairs.items():
        mean = statistics.mean(percent(run["loss"], base["loss"]) for run, base in of)
        text = statistics.mean(text_error(run["blocks"], base["blocks"]) for run, base in of)
        half = sure * (chance.deviation**2 / len(of) + text**2) ** 0.5
        steps = [int(step) for step in of[0][0]["validations"] if int(step) >= STEPS // 2]
        curve = [
            statistics.mean(percent(run["validations"][str(s)], base["validations"][str(s)]) for run, base in of)
            for s in steps
        ]
        found[row] = Gap(mean, half, statistics.mean(curve), *change_over(steps, curve))
    return found

"""Gaps of final losses with their confidence intervals; docs/convergence.rst has the protocol."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy import stats

from benchmarks.convergence_run import STEPS, Spec

__all__ = ["BASELINE", "Gap", "chance_of", "change_over", "gaps_at_length", "percent", "short_gaps"]

BASELINE = "bf16_mixed"
_SURE = 0.975  # quantile at each end of an interval of 95 %
_DRAWS = 4096  # of the bootstrap
Runs = Mapping[Spec, Mapping[str, Any]]


@dataclass(frozen=True)
class Gap:
    """How far a level's loss lies above the baseline's, in percent of the baseline's.

    Attributes:
        level: name in the chart.
        percent: mean over seeds, at the end.
        half: half the width of its interval of 95 %.
        change: growth of the gap over the second half of the training, in points.
        change_half: half the width of the interval of ``change``.
    """

    level: str
    percent: float
    half: float
    change: float
    change_half: float


def percent(loss: float, base: float) -> float:
    """How far ``loss`` lies above ``base``, in percent of ``base``."""
    return 100 * (loss / base - 1)


def short_gaps(runs: Runs) -> dict[str, dict[int, float]]:
    """Percent by seed of each level, from pairs of short runs that ended; ``twin`` is the baseline's second run."""
    found: dict[str, dict[int, float]] = defaultdict(dict)
    for spec, run in runs.items():
        if spec.steps == STEPS or spec.stop < spec.steps or spec.variant not in ("", "twin"):
            continue
        base = runs.get(Spec(BASELINE, "", spec.seed, spec.steps, spec.stop))
        if base is not None and base is not run:
            found[spec.variant or spec.level][spec.seed] = percent(run["loss"], base["loss"])
    return dict(found)


def chance_of(gaps: Mapping[str, Mapping[int, float]]) -> tuple[float, int]:
    """Standard deviation of a single pair's gap, pooled over levels, and its degrees of freedom.

    The expected gap of a twin is zero. That of a level is the mean over its seeds, which takes a degree of freedom.
    """
    squares, freedom = 0.0, 0
    for level, by_seed in gaps.items():
        centre = 0.0 if level == "twin" else statistics.mean(by_seed.values())
        squares += sum((gap - centre) ** 2 for gap in by_seed.values())
        freedom += len(by_seed) - (level != "twin")
    return (squares / freedom) ** 0.5, freedom


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
    """The gap of each level that has a whole run beside the baseline's of the same seed, in the order of ``runs``."""
    chance, freedom = chance_of(short_gaps(runs))
    sure = float(stats.t.ppf(_SURE, freedom))
    pairs: dict[str, list[tuple[Mapping[str, Any], Mapping[str, Any]]]] = defaultdict(list)
    for spec, run in runs.items():
        base = runs.get(Spec(BASELINE, "", spec.seed, STEPS, STEPS))
        if spec.is_whole and base is not None and base is not run:
            pairs[spec.level].append((run, base))
    found = {}
    for level, of in pairs.items():
        mean = statistics.mean(percent(run["loss"], base["loss"]) for run, base in of)
        text = statistics.mean(text_error(run["blocks"], base["blocks"]) for run, base in of)
        half = sure * (chance**2 / len(of) + text**2) ** 0.5
        steps = [int(step) for step in of[0][0]["validations"] if int(step) >= STEPS // 2]
        curve = [
            statistics.mean(percent(run["validations"][str(s)], base["validations"][str(s)]) for run, base in of)
            for s in steps
        ]
        found[level] = Gap(level, mean, half, *change_over(steps, curve))
    return found

"""Gaps of final losses with their confidence intervals; docs/convergence.rst has the protocol."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
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
    "gaps_at_length",
    "paired",
    "percent",
    "rise",
    "text_error",
]

BASELINE = "bf16_mixed"
TWIN = f"{BASELINE}+twin"  # row of the baseline's second run
ENOUGH = 4  # degrees of freedom of a standard deviation that intervals are made of
_DRAWS = 4096  # of the bootstrap
Run = Mapping[str, Any]
Runs = Mapping[Spec, Run]


@dataclass(frozen=True)
class Gap:
    """How far the loss of a row lies above the baseline's: mean over seeds, in percent of the baseline's loss.

    Attributes:
        seeds: number of seeds.
        percent: at the end, over the whole validation text.
        half: half the width of its interval of 95 %.
        curve: of each validation, by its step.
        growth: rise of the gap over the second half of the training, in points.
        growth_half: half the width of the interval of ``growth``.
    """

    seeds: int
    percent: float
    half: float
    curve: dict[int, float]
    growth: float
    growth_half: float

    @property
    def later(self) -> float:
        """Mean gap of the validations of the second half of the training."""
        return statistics.mean(self.curve[step] for step in _later(self.curve))


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

    def half(self, pairs: int, also: float = 0.0) -> float:
        """Half the width of the interval of 95 % of a mean of gaps.

        Args:
            pairs: number of gaps.
            also: standard error of the mean from another source of chance.

        Raises:
            ValueError: no degree of freedom.
        """
        if not self.freedom:
            raise ValueError(f"{self.runs} runs leave no degree of freedom for an interval: train a second seed.")
        sure = float(stats.t.ppf(0.975, self.freedom))
        return sure * (self.deviation**2 / pairs + also**2) ** 0.5


def percent(loss: float, base: float) -> float:
    """How far ``loss`` lies above ``base``, in percent of ``base``."""
    return 100 * (loss / base - 1)


def chance_by_length(runs: Runs) -> dict[int, Chance]:
    """The chance of runs that ended, by their number of steps in rising order."""
    lengths: dict[int, dict[Spec, float]] = defaultdict(dict)
    for spec, run in runs.items():
        if spec.stop == spec.steps:
            lengths[spec.steps][spec] = 100 * math.log(run["loss"])
    return {steps: _chance(lengths[steps]) for steps in sorted(lengths)}


def _chance(figures: Mapping[Spec, float]) -> Chance:
    """What is left of each figure, 100 times a logarithm, after an effect of the row and one of the seed.

    A twin has the baseline's row. The gap of a pair is a difference of two runs: twice the variance of one.
    """
    rows = {spec: BASELINE if spec.row == TWIN else spec.row for spec in figures}
    names, seeds = sorted(set(rows.values())), sorted({spec.seed for spec in figures})
    effects = np.array(
        [[*(row == of for of in names), *(spec.seed == of for of in seeds)] for spec, row in rows.items()],
        dtype=np.float64,
    )
    values = np.array(list(figures.values()), dtype=np.float64)
    solution, _, rank, _ = np.linalg.lstsq(effects, values, rcond=None)
    left = values - effects @ solution
    freedom = len(figures) - int(rank)
    twins = {
        spec.seed: 100 * math.expm1((figure - figures[base]) / 100)
        for spec, figure in figures.items()
        if spec.row == TWIN and (base := replace(spec, variant="")) in figures
    }
    deviation = (2 * float(left @ left) / freedom) ** 0.5 if freedom else float("nan")
    return Chance(deviation, freedom, len(figures), twins)


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


def rise(run: Run) -> float:
    """The rise of a straight line through 100 times the logarithms of the validation losses of the second half."""
    steps = _later(int(step) for step in run["validations"])
    line = stats.linregress(steps, [100 * math.log(run["validations"][str(step)]) for step in steps])
    return float(line.slope * (steps[-1] - steps[0]))


def _later(steps: Iterable[int]) -> list[int]:
    return [step for step in steps if step >= STEPS // 2]


def paired(runs: Runs) -> dict[str, list[tuple[Run, Run]]]:
    """Each whole run of a row beside the baseline's of the same seed, by ``Spec.row`` in order of ``runs``."""
    pairs: dict[str, list[tuple[Run, Run]]] = defaultdict(list)
    for spec, run in runs.items():
        base = runs.get(Spec(BASELINE, "", spec.seed, STEPS, STEPS))
        if spec.is_whole and base is not None and base is not run:
            pairs[spec.row].append((run, base))
    return dict(pairs)


def gaps_at_length(runs: Runs) -> dict[str, Gap]:
    """The gap of each row that :func:`paired` has.

    The interval of a gap is made of the chance of the longest runs with at least ``ENOUGH`` degrees of freedom. The
    interval of a growth is made of the growths of whole runs.
    """
    chance = [of for of in chance_by_length(runs).values() if of.freedom >= ENOUGH][-1]
    growing = _chance({spec: rise(run) for spec, run in runs.items() if spec.is_whole})
    return {
        row: Gap(
            seeds=len(pairs),
            percent=_mean(pairs, lambda run, base: percent(run["loss"], base["loss"])),
            half=chance.half(len(pairs), _mean(pairs, lambda run, base: text_error(run["blocks"], base["blocks"]))),
            curve=_curve(pairs),
            growth=_mean(pairs, lambda run, base: rise(run) - rise(base)),
            growth_half=growing.half(len(pairs)),
        )
        for row, pairs in paired(runs).items()
    }


def _curve(pairs: Sequence[tuple[Run, Run]]) -> dict[int, float]:
    courses = [(run["validations"], base["validations"]) for run, base in pairs]
    return {
        int(step): statistics.mean(percent(run[step], base[step]) for run, base in courses) for step in courses[0][0]
    }


def _mean(pairs: Iterable[tuple[Run, Run]], of: Callable[[Run, Run], float]) -> float:
    return statistics.mean(of(run, base) for run, base in pairs)

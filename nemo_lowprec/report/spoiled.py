"""The layers that low precision spoils: a metric of one of their GEMM operands lies beyond its bound."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from nemo_lowprec.chart import get_level
from nemo_lowprec.report.bounds import (
    MAX_AMAX_RATIO,
    MAX_SATURATION,
    MAX_UNDERFLOW,
    METRICS,
    MIN_SQNR,
    PER_TENSOR,
    amax_ratios,
    ratios,
)
from nemo_lowprec.report.curves import Numbers
from nemo_lowprec.report.monitor.runs import Run

_BOUNDS = {
    "nonfinite": 0.0,
    "sqnr": MIN_SQNR,
    "underflow": MAX_UNDERFLOW,
    "saturation": MAX_SATURATION,
    "amax_ratio": MAX_AMAX_RATIO,
}
_WINDOW = 5  # samples: a layer that crosses a bound in one or two of them is not named


@dataclass(frozen=True)
class Crossing:
    """A metric of one operand beyond its bound.

    Attributes:
        layer, operand: of the model.
        metric: of ``bounds.METRICS``, or ``amax_ratio``.
        value: the worst median over five samples in a row.
        bound: of the metric.
        first_step: the first sampled step beyond the bound.
        beyond: how far, in dB; infinite for values that are not finite.
    """

    layer: str
    operand: str
    metric: str
    value: float
    bound: float
    first_step: int
    beyond: float


def crossings(run: Run) -> list[Crossing]:
    """The crossings of a run, the farthest beyond its bound first."""
    operands = run.operands
    if not set(METRICS) <= operands.metrics.keys():
        return []  # a level without FP8 GEMMs
    metrics = {metric: operands.matrix(metric) for metric in METRICS}
    if get_level(run.about["level"]).scaling in PER_TENSOR:
        metrics["amax_ratio"] = amax_ratios(operands.rows, operands.matrix("amax"))
    worst = {metric: _worst(values, metric) for metric, values in metrics.items()}
    of_samples, found = ratios(metrics), []
    for metric, of_rows in ratios(worst).items():
        for index in np.flatnonzero(of_rows > 1):
            layer, operand = operands.rows[index]
            first = run.steps[int(np.argmax(of_samples[metric][index] > 1))]
            value, beyond = float(worst[metric][index]), float(10 * np.log10(of_rows[index]))
            found.append(Crossing(layer, operand, metric, value, _BOUNDS[metric], first, beyond))
    return sorted(found, key=lambda crossing: -crossing.beyond)


def _worst(values: Numbers, metric: str) -> Numbers:
    """Of each row the median of the window that lies farthest beyond the bound; [rows].

    Args:
        values: [rows, samples] of ``metric``. A sample without a number counts as one at the bound.
    """
    sign = -1 if metric == "sqnr" else 1
    known = np.where(np.isnan(values), _BOUNDS[metric], values)
    windows = np.lib.stride_tricks.sliding_window_view(known, min(_WINDOW, known.shape[1]), axis=1)
    worst: Numbers = sign * (sign * np.median(windows, axis=-1)).max(axis=-1)
    return worst

"""The layers that low precision spoils: a metric of one of their GEMM operands lies beyond its bound."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from nemo_lowprec.report.bounds import MAX_AMAX_RATIO, MAX_SATURATION, MAX_UNDERFLOW, MIN_SQNR
from nemo_lowprec.report.curves import Numbers
from nemo_lowprec.report.monitor.runs import Run

_BOUNDS = {
    "nonfinite": 0.0,
    "sqnr": MIN_SQNR,
    "underflow": MAX_UNDERFLOW,
    "saturation": MAX_SATURATION,
    "amax": MAX_AMAX_RATIO,
}
_WINDOW = 5  # samples: a layer that crosses a bound in one or two of them is not named


@dataclass(frozen=True)
class Crossing:
    """A metric of one operand beyond its bound.

    Attributes:
        layer, operand: of the model.
        metric: ``sqnr``, ``underflow``, ``saturation``, ``nonfinite`` or ``amax``.
        value: the worst median over five samples in a row; of amax its ratio to the median of all layers.
        bound: that the metric has crossed.
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
    found = []
    for metric, bound in _BOUNDS.items():
        if metric not in run.operands.metrics:
            continue
        sign = -1 if metric == "sqnr" else 1
        values = _amax_ratios(run) if metric == "amax" else run.operands.matrix(metric)
        known = np.where(np.isnan(values), bound, values)  # where there is no number, nothing is crossed
        windows = np.lib.stride_tricks.sliding_window_view(known, min(_WINDOW, known.shape[1]), axis=1)
        worst = sign * (sign * np.median(windows, axis=-1)).max(axis=-1)
        for index in np.flatnonzero(sign * (worst - bound) > 0):
            value = float(worst[index])
            first = run.steps[int(np.argmax(sign * (known[index] - bound) > 0))]
            beyond = bound - value if metric == "sqnr" else 10 * math.log10(value / bound) if bound else math.inf
            layer, operand = run.operands.rows[index]
            found.append(Crossing(layer, operand, metric, value, bound, first, beyond))
    return sorted(found, key=lambda crossing: -crossing.beyond)


def _amax_ratios(run: Run) -> Numbers:
    """The amax of each input and weight over the median of all layers in the same sample; NaN for output gradients."""
    amaxes, ratios = run.operands.matrix("amax"), np.full((len(run.operands.rows), len(run.steps)), np.nan)
    for operand in ("input", "weight"):
        rows = [index for index, (_, of_row) in enumerate(run.operands.rows) if of_row == operand]
        if rows:
            known = np.ma.masked_invalid(np.where(amaxes[rows] > 0, amaxes[rows], np.nan))
            ratios[rows] = (known / np.ma.median(known, axis=0)).filled(np.nan)
    return ratios

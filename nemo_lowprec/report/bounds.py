"""Bounds on the errors of an operand's rounding, beyond which its layer is better kept in half precision.

``docs/advising.rst`` has the reasons, and tests compute them. Each bound is where the format serves Gaussian data, with
a scale per tensor, as badly as follows:

* SQNR: as a format with one mantissa bit. E4M3 (three) gives 31.5 dB, E5M2 (two) 25.6 dB, one bit 19.7 dB: 6 dB a bit.
  E5M2 gradients are known to train with a scale alone. NVFP4, with one bit, needs small blocks, rotated operands and
  stochastic rounding.
* Underflow: the standard deviation is E4M3's smallest normal number. 5 % of the values become zero then, and 68 % are
  subnormal, which have fewer bits than the format.
* Saturation: clipping adds as much noise as E4M3's rounding, which it does once 0.3 % of the values are clipped.
  Clipping errs to one side, as rounding does not.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from nemo_lowprec.report.curves import Numbers

if TYPE_CHECKING:
    from nemo_lowprec.formats.errors import Errors

MIN_SQNR = 20.0  # dB
MAX_UNDERFLOW = 5.0  # percent of the values that are not zero
MAX_SATURATION = 0.3  # percent of all values
# amax over the median of the layers' amaxes of the same operand, for inputs and weights: under a scale per tensor,
# values of the usual size then lose 6.6 of the 15 binades in which E4M3 keeps all its bits. Output gradients are no
# sign: they grow and fade with the depth of a model.
MAX_AMAX_RATIO = 100.0
PER_TENSOR = ("delayed", "current")  # ways of scaling with one scale for a whole tensor
_MIN_LAYERS = 3  # of fewer layers a median says nothing

METRICS = ("nonfinite", "sqnr", "underflow", "saturation")

_WORDS = {
    "nonfinite": "{:,.0f} values infinite or NaN",
    "sqnr": "SQNR {:.1f} dB",
    "underflow": "underflow {:.1f} %",
    "saturation": "saturation {:.1f} %",
    "amax_ratio": "an amax {:,.0f} times that of the median layer",
}


def ratios(metrics: Mapping[str, Numbers]) -> dict[str, Numbers]:
    """How far each number lies beyond its metric's bound: above 1 where the bound is crossed.

    A ratio of SQNR is a ratio of the noise's powers; values that are not finite lie infinitely far beyond.

    Args:
        metrics: names of ``METRICS`` and perhaps ``amax_ratio``, each to numbers of one shape; NaN for no number.
    """
    found = {
        "nonfinite": np.where(metrics["nonfinite"] > 0, math.inf, 0.0),
        "sqnr": 10 ** ((MIN_SQNR - metrics["sqnr"]) / 10),
        "underflow": metrics["underflow"] / MAX_UNDERFLOW,
        "saturation": metrics["saturation"] / MAX_SATURATION,
    }
    if "amax_ratio" in metrics:
        found["amax_ratio"] = metrics["amax_ratio"] / MAX_AMAX_RATIO
    return {metric: np.where(np.isnan(ratio), 0.0, ratio) for metric, ratio in found.items()}


def amax_ratios(rows: Sequence[tuple[str, ...]], amaxes: Numbers) -> Numbers:
    """Each amax over the median of the layers' amaxes of the same operand, for inputs and weights.

    Args:
        rows: (layer, operand).
        amaxes: [rows] of one sample, or [rows, samples]; zero and NaN stand for an unknown amax.

    Returns:
        Of the shape of ``amaxes``; NaN for output gradients, for unknown amaxes, and in a sample of fewer than three
        layers.
    """
    found = np.full_like(amaxes, np.nan)
    for kind in ("input", "weight"):
        at = [i for i, (_, operand) in enumerate(rows) if operand == kind]
        if at:
            there = amaxes[at]
            known = np.where((there > 0) & np.isfinite(there), there, np.nan)
            is_enough = np.count_nonzero(~np.isnan(known), axis=0) >= _MIN_LAYERS
            medians = np.nanmedian(np.where(is_enough, known, 1.0), axis=0)  # of NaN alone numpy warns
            found[at] = np.where(is_enough, known / medians, np.nan)
    return found


def said(metrics: Mapping[str, Numbers], row: int) -> list[str]:
    """Words such as "SQNR 12.3 dB" for each metric of ``row`` that lies beyond its bound."""
    one = {metric: numbers[row : row + 1] for metric, numbers in metrics.items()}
    beyond_one = [metric for metric, ratio in ratios(one).items() if ratio[0] > 1]
    return [_WORDS[metric].format(float(one[metric][0])) for metric in beyond_one]


def crossed(errors: Errors) -> list[str]:
    """Words for each metric of ``errors`` that lies beyond its bound."""
    return said(_metrics_of(errors), 0)


def beyond(errors: Errors) -> float:
    """How far ``errors`` lies beyond its bounds: the largest ratio, above 1 where one is crossed."""
    return max(float(ratio[0]) for ratio in ratios(_metrics_of(errors)).values())


def _metrics_of(errors: Errors) -> dict[str, Numbers]:
    numbers = {metric: getattr(errors, metric) for metric in METRICS}
    return {metric: np.array([math.nan if n is None else n], dtype=np.float64) for metric, n in numbers.items()}

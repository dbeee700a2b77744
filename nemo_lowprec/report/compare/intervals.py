"""Student's t interval of the mean of a few numbers."""

from __future__ import annotations

import math
from functools import cache

import numpy as np

from nemo_lowprec.report.curves import Numbers

LEVEL = 0.95


def half_width(numbers: Numbers) -> Numbers:
    """Half the width of the 95 % confidence interval of the mean.

    Args:
        numbers: [n, ...] with n of at least 2, independent along the first dimension.
    """
    n = len(numbers)
    return np.asarray(quantile(n - 1) * numbers.std(axis=0, ddof=1) / math.sqrt(n))


@cache
def quantile(freedom: int) -> float:
    """The t within plus and minus which lies 95 % of Student's distribution with ``freedom`` degrees of freedom."""
    low, high = 0.0, 1.0
    while _within(high, freedom) < LEVEL:
        low, high = high, 2 * high
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _within(middle, freedom) < LEVEL else (low, middle)
    return high


def _within(t: float, freedom: int) -> float:
    """The probability of a magnitude below ``t``: Abramowitz and Stegun, 26.7.3 and 26.7.4."""
    angle = math.atan(t / math.sqrt(freedom))
    sine, cosine = math.sin(angle), math.cos(angle)
    odd = freedom % 2
    term, total = (cosine if odd else 1.0), 0.0
    for k in range(1 + odd, freedom, 2):
        total += term
        term *= cosine**2 * k / (k + 1)
    return 2 / math.pi * (angle + sine * total) if odd else sine * total

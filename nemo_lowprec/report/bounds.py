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
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nemo_lowprec.formats.errors import Errors

MIN_SQNR = 20.0  # dB
MAX_UNDERFLOW = 5.0  # percent of the values that are not zero
MAX_SATURATION = 0.3  # percent of all values
# amax over the median of the layers' amaxes of the same operand, for inputs and weights: under a scale per tensor,
# values of the usual size then lose 6.6 of the 15 binades in which E4M3 keeps all its bits. Output gradients are no
# sign: they grow and fade with the depth of a model.
MAX_AMAX_RATIO = 100.0


def crossed(errors: Errors) -> list[str]:
    """What of ``errors`` lies beyond its bound, in words such as "SQNR 12.3 dB"; empty for nothing."""
    found = []
    if errors.nonfinite:
        found.append(f"{errors.nonfinite:,} values infinite or NaN")
    if errors.sqnr is not None and errors.sqnr < MIN_SQNR:
        found.append(f"SQNR {errors.sqnr:.1f} dB")
    if errors.underflow > MAX_UNDERFLOW:
        found.append(f"underflow {errors.underflow:.1f} %")
    if errors.saturation > MAX_SATURATION:
        found.append(f"saturation {errors.saturation:.1f} %")
    return found


def beyond(errors: Errors) -> float:
    """How far ``errors`` lies beyond its bounds: the largest ratio to one, above 1 where one is crossed.

    A ratio of SQNR is one of amplitudes of the noise.
    """
    ratios = [errors.underflow / MAX_UNDERFLOW, errors.saturation / MAX_SATURATION]
    if errors.sqnr is not None:
        ratios.append(10 ** ((MIN_SQNR - errors.sqnr) / 20))
    return math.inf if errors.nonfinite else max(ratios)

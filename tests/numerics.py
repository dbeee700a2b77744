"""The number formats once more, in float64 and from their definitions, for the tests to compare with."""

import numpy as np
import torch

# name: (exponent bits, mantissa bits, bias, has infinities)
LAYOUT = {"e4m3": (4, 3, 7, False), "e5m2": (5, 2, 15, True), "e2m1": (2, 1, 1, False)}


def value_of(code: int, name: str) -> float:
    """The value of a code."""
    exponent_bits, mantissa_bits, bias, infinities = LAYOUT[name]
    sign = -1.0 if code >> (exponent_bits + mantissa_bits) else 1.0
    exponent = (code >> mantissa_bits) & (2**exponent_bits - 1)
    mantissa = code & (2**mantissa_bits - 1)
    if name == "e4m3" and code & 0x7F == 0x7F:
        return float("nan")
    if infinities and exponent == 2**exponent_bits - 1:
        return float("nan") if mantissa else sign * float("inf")
    if exponent == 0:
        return sign * mantissa * 2.0 ** (1 - bias - mantissa_bits)
    return sign * (1 + mantissa * 2.0**-mantissa_bits) * 2.0 ** (exponent - bias)


def grid(name: str) -> np.ndarray:
    """The finite values from 0 up; an even position has an even mantissa."""
    exponent_bits, mantissa_bits, *_ = LAYOUT[name]
    values = [value_of(code, name) for code in range(2 ** (exponent_bits + mantissa_bits))]
    return np.array([v for v in values if np.isfinite(v)])


def nearest_even(values, name: str) -> np.ndarray:
    """Round to the nearest finite value, ties to the even code; NaN stays NaN."""
    values = np.asarray(values, dtype=np.float64)
    levels = grid(name)
    distance = np.abs(levels - np.minimum(np.abs(values), levels[-1])[..., None])
    code = distance.argmin(-1)  # the lower one of a tie
    above = np.minimum(code + 1, len(levels) - 1)
    tie = np.take_along_axis(distance, above[..., None], -1)[..., 0] == distance.min(-1)
    code = np.where(tie & (code % 2 == 1), above, code)
    return np.where(np.isnan(values), values, np.copysign(levels[code], values))


def sqnr(got: torch.Tensor, want: torch.Tensor) -> float:
    """Signal to quantization noise in dB."""
    want, got = want.double(), got.double()
    return (10 * torch.log10(want.pow(2).sum() / (got - want).pow(2).sum())).item()

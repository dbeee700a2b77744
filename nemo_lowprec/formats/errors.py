"""Errors of rounding a tensor to a format: values that became zero, values that were clipped, and the noise.

``add_errors`` is the definition; the kernel in kernels/ is tested against it. The sums of several tensors, calls and
processes add up, and ``Errors`` reads them.

* A value underflows where it is not zero, and its stored value is.
* A value saturates where it lies beyond the format's largest value by more than half a step of the format there, so
  that it loses more than rounding takes.
* SQNR, the signal-to-quantization-noise ratio, is ``10 log10(sum(value**2) / sum((value - stored)**2))`` in dB.

Values that are not finite are counted, and are in no other number.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from nemo_lowprec.formats.floats import FloatFormat

# Columns of the sums, FP64; and of the extremes, FP32.
SUMS = ("count", "nonzero", "underflowed", "saturated", "nonfinite", "signal", "noise")
EXTREMES = ("amax", "amin", "scale_inv")


def clipped_beyond(fmt: FloatFormat) -> float:
    """The largest magnitude of scaled values that rounds to ``fmt.max`` without being clipped."""
    exponent = math.frexp(fmt.max)[1]
    step = torch.finfo(fmt.dtype).eps * 2.0 ** (exponent - 1)
    return fmt.max + step / 2


def new_sums(rows: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Empty sums FP64 [rows, len(SUMS)] and extremes FP32 [rows, len(EXTREMES)]."""
    sums = torch.zeros(rows, len(SUMS), dtype=torch.float64, device=device)
    extremes = torch.zeros(rows, len(EXTREMES), dtype=torch.float32, device=device)
    clear(sums, extremes)
    return sums, extremes


def clear(sums: Tensor, extremes: Tensor) -> None:
    """Empty sums and extremes in place."""
    sums.zero_()
    extremes.zero_()
    extremes[:, 1] = math.inf


def add_errors(sums: Tensor, extremes: Tensor, values: Tensor, stored: Tensor, scale_inv: Tensor, limit: float) -> None:
    """Add the errors of one tensor to a row of sums.

    Args:
        sums: FP64 [len(SUMS)].
        extremes: FP32 [len(EXTREMES)].
        values: any float dtype and shape, before they were rounded.
        stored: of the same shape, the values that the stored tensor stands for.
        scale_inv: FP32, broadcasts to ``values``: stored value / scaled value.
        limit: see ``clipped_beyond``.
    """
    if not values.numel():
        return
    values, stored = values.float(), stored.float()
    finite = values.isfinite() & stored.isfinite()
    values, stored = torch.where(finite, values, 0.0), torch.where(finite, stored, 0.0)
    magnitude = values.abs()
    nonzero = magnitude > 0
    found = (
        torch.tensor(values.numel(), dtype=torch.float64),
        nonzero.sum(),
        (nonzero & (stored == 0)).sum(),
        (magnitude > limit * scale_inv).sum(),
        (~finite).sum(),
        values.double().square().sum(),
        (values.double() - stored.double()).square().sum(),
    )
    sums += torch.stack([number.to(sums) for number in found])
    smallest = torch.where(nonzero, magnitude, math.inf).amin()
    largest = torch.stack([magnitude.amax(), scale_inv.float().amax()])
    extremes[0::2] = torch.maximum(extremes[0::2], largest)
    extremes[1] = torch.minimum(extremes[1], smallest)


def decibels(signal: Tensor, noise: Tensor) -> Tensor:
    """The ratios of sums of squares in dB; NaN where nothing was rounded, or a sum has overflowed."""
    known = signal.isfinite() & noise.isfinite() & (signal > 0) & (noise > 0)
    return torch.where(known, 10 * torch.log10(signal / noise), torch.nan)


def read_sums(sums: Tensor, extremes: Tensor) -> dict[str, Tensor]:
    """The numbers of ``Errors`` of many rows, by name.

    Args:
        sums: FP64 [rows, len(SUMS)].
        extremes: FP32 or FP64 [rows, len(EXTREMES)].

    Returns:
        FP64 [rows] each; NaN in the place of None.
    """
    count, nonzero, underflowed, saturated, nonfinite, signal, noise = sums.unbind(1)
    amax, amin, scale_inv = extremes.double().unbind(1)
    known = (amax > 0) & amin.isfinite()
    return {
        "count": count,
        "amax": amax,
        "scale": torch.where(scale_inv > 0, 1 / scale_inv, torch.nan),
        "underflow": 100 * underflowed / nonzero.clamp(min=1),
        "saturation": 100 * saturated / count.clamp(min=1),
        "nonfinite": nonfinite,
        "sqnr": decibels(signal, noise),
        "binades": torch.where(known, torch.log2(amax / amin), torch.nan),
    }


@dataclass(frozen=True)
class Errors:
    """A row of sums, read.

    Attributes:
        count: number of values.
        amax: largest magnitude.
        scale: scaled value / value; where blocks have scales of their own, the smallest one. None without values.
        underflow: percentage of the values that are not zero which became zero.
        saturation: percentage of the values that were clipped.
        nonfinite: number of values that are infinite or NaN.
        sqnr: in dB; None where all values are stored exactly, where all are zero, and where a square overflows: the
            kernel adds in FP32, up to magnitudes of 1e19.
        binades: log2 of the largest over the smallest magnitude that is not zero; None where all are zero.
    """

    count: int
    amax: float
    scale: float | None
    underflow: float
    saturation: float
    nonfinite: int
    sqnr: float | None
    binades: float | None

    @classmethod
    def read(cls, sums: list[float], extremes: list[float]) -> Errors:
        """The errors of one row of sums and extremes on the host."""
        rows = (torch.tensor([row], dtype=torch.float64, device="cpu") for row in (sums, extremes))
        found = {name: None if number.isnan() else float(number) for name, number in read_sums(*rows).items()}
        return cls(**found | {name: int(found[name] or 0) for name in ("count", "nonfinite")})  # type: ignore[arg-type]

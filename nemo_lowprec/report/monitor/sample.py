"""The numbers of one sampled step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from nemo_lowprec.formats.errors import Errors

Row = tuple[str, str]  # layer and operand

# Metrics of operands, in the file and in reports. See ``formats.errors.Errors``.
OPERAND_METRICS = ("amax", "scale", "underflow", "saturation", "sqnr", "binades", "nonfinite")
# Metrics of parameters: the percentage of elements with a gradient that kept their value in the step; the SQNR of
# weights beside their masters, of stored gradients, and of the first and the second moments.
PARAM_METRICS = ("lost", "weight_sqnr", "gradient_sqnr", "first_sqnr", "second_sqnr")


@dataclass
class Sample:
    """What low precision did in one step, over all processes.

    Attributes:
        step: its number, counted from 1.
        operands: the errors of each operand that was quantized.
        params: for each parameter the numbers of ``PARAM_METRICS``; None where nothing is rounded, or nothing known.
        wire_sqnr: of the means of gradients that were sent in FP8, in dB; None where there were none.
        grad_norm: L2 norm of the true gradients before clipping; None where unknown.
        loss_scale: None at a level without.
        skipped: whether the step was skipped because a gradient was not finite.
        skipped_steps: skipped steps so far.
    """

    step: int
    operands: dict[Row, Errors] = field(default_factory=dict)
    params: dict[str, tuple[float | None, ...]] = field(default_factory=dict)
    wire_sqnr: float | None = None
    grad_norm: float | None = None
    loss_scale: float | None = None
    skipped: bool = False
    skipped_steps: int = 0


def decibels(signal: float, noise: float) -> float | None:
    """The ratio of two sums of squares in dB; None where nothing was rounded, or nothing is known."""
    finite = math.isfinite(signal) and math.isfinite(noise)
    return 10 * math.log10(signal / noise) if finite and signal > 0 and noise > 0 else None


def operands_of(rows: Sequence[Row], sums: Tensor, extremes: Tensor) -> dict[Row, Errors]:
    """The errors of the rows that have values."""
    numbers = zip(rows, sums.tolist(), extremes.tolist(), strict=True)
    return {row: Errors.read(added, ends) for row, added, ends in numbers if added[0]}


def params_of(names: Sequence[str], updates: Tensor, gradients: Tensor) -> dict[str, tuple[float | None, ...]]:
    """The numbers of all parameters, from the sums of ``UpdateErrors`` and ``GradientErrors``."""
    found: dict[str, tuple[float | None, ...]] = {}
    for name, (updated, unchanged, *squares), stored in zip(names, updates.tolist(), gradients.tolist(), strict=True):
        lost = 100 * unchanged / updated if updated else None
        weight, first, second = (decibels(*squares[i : i + 2]) for i in range(0, 6, 2))
        found[name] = lost, weight, decibels(*stored[-2:]), first, second
    return found

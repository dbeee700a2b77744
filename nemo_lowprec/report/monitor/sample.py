"""The numbers of one sampled step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from nemo_lowprec.formats.errors import decibels, read_sums

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
        rows: (layer, operand) of the operands that were quantized.
        operands: metric to its numbers for ``rows``, FP64 on the CPU; NaN where there is none.
        names: of the parameters.
        params: metric to its numbers for ``names``; NaN where nothing is rounded, or nothing known.
        wire_sqnr: of the means of gradients that were sent in FP8, in dB; NaN where there were none.
        grad_norm: L2 norm of the true gradients before clipping; NaN where unknown.
        loss_scale: None at a level without.
        skipped: whether the step was skipped because a gradient was not finite.
        skipped_steps: skipped steps so far.
    """

    step: int
    rows: Sequence[Row] = ()
    operands: dict[str, Tensor] = field(default_factory=dict)
    names: Sequence[str] = ()
    params: dict[str, Tensor] = field(default_factory=dict)
    wire_sqnr: float = float("nan")
    grad_norm: float = float("nan")
    loss_scale: float | None = None
    skipped: bool = False
    skipped_steps: int = 0


def operands_of(rows: Sequence[Row], sums: Tensor, extremes: Tensor) -> tuple[list[Row], dict[str, Tensor]]:
    """The rows that have values, and their metrics."""
    there = sums[:, 0] > 0
    found = read_sums(sums[there], extremes[there])
    kept = [row for row, has in zip(rows, there.tolist(), strict=True) if has]
    return kept, {metric: found[metric] for metric in OPERAND_METRICS}


def params_of(updates: Tensor, gradients: Tensor, skipped: bool) -> dict[str, Tensor]:
    """The metrics of all parameters, from the sums of ``UpdateErrors`` and ``GradientErrors``.

    Of a step that was ``skipped`` only the gradients are known.
    """
    updated, unchanged, *squares = updates.unbind(1)
    lost = torch.where(updated > 0, 100 * unchanged / updated.clamp(min=1), torch.nan)
    weight, first, second = (decibels(*squares[i : i + 2]) for i in range(0, 6, 2))
    found = (lost, weight, decibels(*gradients[:, -2:].unbind(1)), first, second)
    none = torch.full_like(lost, torch.nan)
    return {
        metric: none if skipped and metric != "gradient_sqnr" else numbers
        for metric, numbers in zip(PARAM_METRICS, found, strict=True)
    }

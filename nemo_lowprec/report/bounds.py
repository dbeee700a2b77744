"""Bounds on what rounding may do to a layer's GEMM operands; a layer that crosses a bound is named to the user."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Bounds:
    """One bound for each metric.

    Attributes:
        sqnr: by operand, the smallest SQNR in dB.
        underflow: by operand, the largest percentage of values that become zero.
        saturation: by operand, the largest percentage of values that are clipped.
    """

    sqnr: Mapping[str, float] = field(default_factory=lambda: {"input": 20.0, "weight": 20.0, "grad_output": 15.0})
    underflow: Mapping[str, float] = field(default_factory=lambda: {"input": 10.0, "weight": 10.0, "grad_output": 20.0})
    saturation: Mapping[str, float] = field(default_factory=lambda: {"input": 1.0, "weight": 1.0, "grad_output": 1.0})


BOUNDS = Bounds()

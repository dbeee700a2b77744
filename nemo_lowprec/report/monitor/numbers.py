"""Numbers as JSON has them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def rounded(numbers: Tensor, digits: int = 4) -> list[float | None]:
    """FP64 numbers of ``digits`` significant digits; None for numbers that are not finite, which JSON has not."""
    finite = numbers.isfinite()
    size = torch.where(finite & (numbers != 0), numbers.abs(), 1.0)
    places = digits - 1 - size.log10().floor()
    # A whole number over or times a power of ten is the float nearest to the decimal number, which JSON writes as such.
    up, down = 10.0 ** places.clamp(min=0), 10.0 ** (-places).clamp(min=0)
    found: list[float | None] = ((torch.where(finite, numbers, 0.0) * up / down).round() * down / up).tolist()
    for i in (~finite).nonzero().flatten().tolist():
        found[i] = None
    return found


def rounded_rows(rows: Sequence[Tensor]) -> list[list[float | None]]:
    """``rounded`` of each of some vectors, whose lengths may differ, in a few operations for all of them."""
    found, first = rounded(torch.cat(list(rows))) if rows else [], 0
    parts = []
    for row in rows:
        parts.append(found[first : first + len(row)])
        first += len(row)
    return parts

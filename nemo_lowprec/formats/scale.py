"""Per-tensor scales: the rules of Transformer Engine and of MS-AMP.

``stored = cast(value * scale)``, ``value = stored * scale_inv`` with ``scale = (max / amax) / 2**margin``, which MS-AMP
rounds down to a power of two.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from nemo_lowprec.formats.block_scale_128 import UNIT, block_exponent, power
from nemo_lowprec.formats.floats import FloatFormat

_FP32_MAX = torch.finfo(torch.float32).max


def compute_amax(values: Tensor) -> Tensor:
    """Largest magnitude of ``values`` (any shape) as a 0-dim FP32 tensor; 0 for no element, NaN where one is NaN."""
    if values.numel() == 0:
        return values.new_zeros((), dtype=torch.float32)
    low, high = torch.aminmax(values)  # one pass; abs().max() makes a copy
    return torch.maximum(-low, high).float()


def compute_scale(amax: Tensor, fp_max: Tensor | float, margin: int = 0, previous: Tensor | None = None) -> Tensor:
    """Scale for a tensor whose largest magnitude is ``amax`` (FP32, any shape; scales come out in the same shape).

    A zero or non-finite amax keeps ``previous`` (1 where there is none). Source: Transformer Engine's
    ``_default_sf_compute`` with the clamp of its infinite scales.
    """
    # torch divides a number by a tensor as the tensor's reciprocal times the number: two roundings.
    # (A 0-dim tensor of the CPU goes with any device, without a copy.)
    top = fp_max if isinstance(fp_max, Tensor) else torch.tensor(fp_max, dtype=torch.float32, device="cpu")
    scale = top / amax
    if margin:
        scale = scale / 2.0**margin
    keep = 1.0 if previous is None else previous
    return torch.where((amax > 0) & (amax < math.inf), scale.clamp(max=_FP32_MAX), keep)


def power_of_two_scale(amax: Tensor, fmt: FloatFormat, margin: int = 0) -> Tensor:
    """The largest power of two that keeps ``amax`` (FP32, any shape) inside the format, divided by 2**margin.

    1 for a zero or non-finite amax. Source: MS-AMP (arXiv:2310.18313, section 2.2).
    """
    usable = (amax > 0) & torch.isfinite(amax)
    exponent = 2 * UNIT - margin - block_exponent(torch.where(usable, amax, 1.0), fmt).int()
    return torch.where(usable, power(exponent), 1.0)

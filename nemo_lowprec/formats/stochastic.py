"""Stochastic rounding to 16-bit floats with random numbers that are a function of seed, step, tensor and element.

Nothing is drawn from a generator: the same step of the same run rounds the same way on every device, and a resumed
run goes on as the interrupted one would have.

Source: the mixing function is lowbias32 of Chris Wellons' hash-prospector (public domain).
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["mix", "round_stochastic", "rounding_rule", "salt_of"]

_MASK = 0xFFFFFFFF


def mix(x: Tensor | int) -> Tensor | int:
    """Scramble 32 bits, held in an int64 tensor or an int."""
    x = x & _MASK
    x = x ^ (x >> 16)
    x = (x * 0x7FEB352D) & _MASK
    x = x ^ (x >> 15)
    x = (x * 0x846CA68B) & _MASK
    return x ^ (x >> 16)


def salt_of(seed: int, step: int, tensor: int) -> int:
    """The random stream of one tensor at one step."""
    salt = mix(mix(mix(seed) ^ step) ^ tensor)
    assert isinstance(salt, int)
    return salt


def rounding_rule(dtype: torch.dtype) -> tuple[int, float]:
    """(mantissa bits that an FP32 number loses, smallest normal number where FP32's is another) of a 16-bit float."""
    return {torch.float16: (13, 2.0**-14), torch.bfloat16: (16, 0.0)}[dtype]


def round_stochastic(values: Tensor, dtype: torch.dtype, salt: int) -> Tensor:
    """Round FP32 ``values`` up or down to FP16 or BF16, up with the probability of the fraction that is cut off.

    Two elements share 32 random bits. What is not finite becomes NaN.
    """
    bits, smallest = rounding_rule(dtype)
    index = (torch.arange(values.numel(), device=values.device) & _MASK).view(values.shape)
    pair = mix((index >> 1) ^ salt)
    assert isinstance(pair, Tensor)
    random = (pair >> ((index & 1) * (32 - bits))) & ((1 << bits) - 1)
    # Numbers below the smallest normal one all have its step: added to it, they lose the same bits as the others.
    shift = torch.where(values.abs() < smallest, smallest, 0.0).copysign(values)
    raw = (values + shift).view(torch.int32) + random.int()
    rounded = (raw & -(1 << bits)).view(torch.float32) - shift
    return torch.where(values.isfinite(), rounded, torch.nan).to(dtype)

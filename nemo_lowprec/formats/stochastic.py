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


def rounding_rule(dtype: torch.dtype) -> tuple[int, int]:
    """(mantissa bits, exponent of the smallest normal number as FP32 stores it) of a 16-bit float dtype.

    BF16's smallest exponents are left out, so that steps between its numbers are normal FP32 numbers.
    """
    return {torch.float16: (10, 113), torch.bfloat16: (7, 8)}[dtype]


def round_stochastic(values: Tensor, dtype: torch.dtype, salt: int) -> Tensor:
    """Round FP32 ``values`` up or down to FP16 or BF16, up with the probability of the fraction that is cut off."""
    mantissa, lowest = rounding_rule(dtype)
    bits = 23 - mantissa  # those that a normal number loses
    index = torch.arange(values.numel(), device=values.device).view(values.shape)
    random = mix(index ^ salt)
    assert isinstance(random, Tensor)
    fraction = (random >> (32 - bits)).float() * 2.0**-bits
    exponent = ((values.view(torch.int32) >> 23) & 0xFF).clamp(min=lowest) - mantissa
    step = (exponent << 23).view(torch.float32)
    inverse = ((254 - exponent) << 23).view(torch.float32)
    rounded = torch.floor(values * inverse + fraction) * step
    return torch.where(values.isfinite(), rounded, values).to(dtype)

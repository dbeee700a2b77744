"""Stochastic rounding to low-bit floats. Its random numbers are a hash of seed, step, tensor and element.

No generator is drawn from: the same step of the same run rounds the same way on every device, and a resumed run rounds
as the uninterrupted run would.

Source: the mixing function is lowbias32 of Chris Wellons' hash-prospector (public domain).
"""

from __future__ import annotations

import torch
from torch import Tensor

from nemo_lowprec.formats.floats import encode

_MASK = 0xFFFFFFFF


def mix(x: Tensor | int) -> Tensor | int:
    """Scramble 32 bits, held in an int64 tensor or an int."""
    x = x & _MASK
    x = x ^ (x >> 16)
    x = (x * 0x7FEB352D) & _MASK
    x = x ^ (x >> 15)
    x = (x * 0x846CA68B) & _MASK
    return x ^ (x >> 16)


def salt_of(seed: int, *keys: int) -> int:
    """A random stream (32 bits) for these keys, such as the step and the index of a tensor."""
    salt = mix(seed)
    for key in keys:
        salt = mix(salt ^ key)
    assert isinstance(salt, int)
    return salt


def salts_of_values(values: Tensor, count: int) -> Tensor:
    """A random stream for each element of FP32 ``values`` (int64): a hash of its bits and of ``count``."""
    return (values.contiguous().view(torch.int32).long() & _MASK) ^ mix(count)


def rounding_rule(dtype: torch.dtype) -> tuple[int, float]:
    """(mantissa bits that FP32 has more, smallest normal number or 0 where it is FP32's) of a low-bit float."""
    return {
        torch.float16: (13, 2.0**-14), torch.bfloat16: (16, 0.0), torch.float8_e4m3fn: (20, 2.0**-6),
        torch.uint8: (20, 2.0**-14), torch.int8: (18, 1.0),  # E5M3, E2M5
    }[dtype]  # fmt: skip


def round_stochastic(values: Tensor, dtype: torch.dtype, salt: Tensor | int) -> Tensor:
    """Round FP32 ``values`` up or down to a dtype of ``rounding_rule``, up with the probability of the part cut off.

    Two elements share 32 random bits where 16 each suffice. Non-finite elements become NaN.

    Args:
        salt: random stream of the tensor, or int64 of the shape of ``values`` with one for each element.
    """
    bits, smallest = rounding_rule(dtype)
    index = (torch.arange(values.numel(), device=values.device) & _MASK).view(values.shape)
    shared = bits <= 16
    random = mix((index >> 1 if shared else index) ^ salt)
    assert isinstance(random, Tensor)
    if shared:
        random = random >> ((index & 1) * (32 - bits))
    # All numbers below the smallest normal one have the same step. Added to the smallest normal number, they lose as
    # many bits as larger numbers.
    shift = torch.where(values.abs() < smallest, smallest, 0.0).copysign(values)
    raw = (values + shift).view(torch.int32) + (random & ((1 << bits) - 1)).int()
    rounded = (raw & -(1 << bits)).view(torch.float32) - shift
    return encode(torch.where(values.isfinite(), rounded, torch.nan), dtype)

"""``formats.stochastic`` for Triton kernels, bit for bit. Importing this file needs Triton."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def mix(x):
    """Scramble 32 bits (uint32)."""
    x = x ^ (x >> 16)
    x = x * 0x7FEB352D
    x = x ^ (x >> 15)
    x = x * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def round_stochastic(x, index, salt, BITS: tl.constexpr, SMALLEST: tl.constexpr):
    """FP32 ``x`` rounded to values of a format, as FP32; BITS, SMALLEST: ``rounding_rule``; index, salt: uint32."""
    if BITS <= 16:
        random = mix((index >> 1) ^ salt) >> ((index & 1) * (32 - BITS))
    else:
        random = mix(index ^ salt)
    random = random & ((1 << BITS) - 1)
    sign = x.to(tl.int32, bitcast=True) & -0x80000000
    shift = tl.where(tl.abs(x) < SMALLEST, SMALLEST, 0.0).to(tl.int32, bitcast=True) | sign
    shift = shift.to(tl.float32, bitcast=True)
    raw = (x + shift).to(tl.int32, bitcast=True) + random.to(tl.int32, bitcast=True)
    rounded = (raw & -(1 << BITS)).to(tl.float32, bitcast=True) - shift  # a NaN's bits may have run over
    return tl.fma(x, 0.0, rounded)

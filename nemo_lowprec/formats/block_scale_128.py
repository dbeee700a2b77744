"""Blocks of 128 elements within a row, each with a power-of-two scale: gradients, optimizer states and masters.

A tensor's first dimension counts its rows, and all other dimensions together are one row; a tensor of fewer than two
dimensions is one row. A cut along the first dimension cuts no block, so that resharding changes no value.

A scale is one byte, the exponent of its inverse: ``value = data * 2**(exponent - 127)``, where the exponent is the
smallest that keeps the block's largest finite magnitude inside the format. Blocks of zeros have exponent 127, and
exponents stay within [27, 254], so that scale and inverse are normal FP32 numbers. Non-finite elements are stored as
NaN and do not count in the scale of their block.

Source: the scale rule is MS-AMP's (arXiv:2310.18313, section 2.2), per block in place of per tensor.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from nemo_lowprec.formats.floats import FloatFormat, decode, encode
from nemo_lowprec.formats.stochastic import round_stochastic

BLOCK = 128
UNIT = 127  # exponent of the scale 1
LOWEST = 27


def block_grid(shape: torch.Size | tuple[int, ...]) -> tuple[int, int, int]:
    """(rows, elements of a row, blocks of a row) of a tensor of this shape."""
    numel = math.prod(shape)
    rows = shape[0] if len(shape) > 1 else 1
    cols = numel // rows if rows else 0
    return rows, cols, -(-cols // BLOCK)


def exponent_rule(fmt: FloatFormat) -> tuple[int, int]:
    """(exponent, mantissa bits) of the format's largest value, as in its FP32 representation."""
    mantissa, exponent = math.frexp(fmt.max)
    return exponent - 1, int((mantissa * 2 - 1) * 2**23)


def block_exponent(amax: Tensor, fmt: FloatFormat) -> Tensor:
    """Stored exponents (uint8) for blocks whose largest finite magnitudes are ``amax`` (FP32, any shape)."""
    top, mantissa = exponent_rule(fmt)
    bits = amax.view(torch.int32)
    exponent = (bits >> 23) - top + ((bits & 0x7FFFFF) > mantissa).int()
    return torch.where(bits > 0, exponent.clamp(LOWEST, 254), UNIT).to(torch.uint8)


def power(exponent: Tensor) -> Tensor:
    """2**(exponent - 127) as FP32, for integer exponents in [1, 254]."""
    return (exponent.int() << 23).view(torch.float32)


def _blocks(values: Tensor) -> Tensor:
    rows, cols, blocks = block_grid(values.shape)
    padded = F.pad(values.reshape(rows, cols), (0, blocks * BLOCK - cols))
    return padded.view(rows, blocks, BLOCK)


def scale_to_blocks(values: Tensor, fmt: FloatFormat, positive: bool = False) -> tuple[Tensor, Tensor]:
    """Scale ``values`` (FP32, any shape) by blocks, without rounding; ``positive`` as in ``quantize_rows``.

    Returns:
        FP32 of the same shape, NaN for non-finite elements; and exponents, uint8 [rows, blocks of a row].
    """
    blocks = _blocks(values)
    finite = blocks.isfinite()
    amax = torch.where(finite, blocks.abs(), 0.0).amax(-1) if blocks.numel() else blocks.new_zeros(blocks.shape[:2])
    exponent = block_exponent(amax, fmt)
    scaled = blocks * power(254 - exponent.int())[..., None]
    scaled = torch.where(finite, scaled, torch.nan)
    if positive:
        scaled = scaled.maximum(torch.where(amax > 0, fmt.smallest, 0.0)[..., None])
    return scaled.flatten(1)[:, : block_grid(values.shape)[1]].reshape(values.shape), exponent


def quantize_rows(
    values: Tensor, fmt: FloatFormat, *, salt: int | None = None, positive: bool = False
) -> tuple[Tensor, Tensor]:
    """Quantize a tensor of any shape in blocks.

    Args:
        salt: round stochastically with this random stream; None rounds to nearest even.
        positive: whether no value is negative. In a block with a positive value, smaller values (zeros included) are
            then stored as the format's smallest positive number.

    Returns:
        data of the same shape in ``fmt``, contiguous, and exponents, uint8 [rows, blocks of a row].
    """
    scaled, exponent = scale_to_blocks(values.float(), fmt, positive)
    if salt is not None:
        return round_stochastic(scaled, fmt.dtype, salt), exponent
    return encode(scaled, fmt.dtype), exponent


def dequantize_rows(data: Tensor, exponent: Tensor) -> Tensor:
    """Return the values as FP32: exact, except below FP32's normal range on devices that flush such numbers to zero."""
    values = _blocks(decode(data)) * power(exponent)[..., None]
    # Contiguous: torch.save would write the padding of short rows, too.
    return values.flatten(1)[:, : block_grid(data.shape)[1]].reshape(data.shape).contiguous()

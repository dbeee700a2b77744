"""The 8-bit float formats, FP16 as a scaled storage format, and the saturating cast into them.

Source: "FP8 Formats for Deep Learning", arXiv:2209.05433 (the OCP E4M3 has no infinity, E5M2 follows IEEE 754).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor


@dataclass(frozen=True)
class FloatFormat:
    """A storage format: its torch dtype and its largest finite value."""

    name: str
    dtype: torch.dtype
    max: float

    @property
    def smallest(self) -> float:
        """The smallest positive value."""
        if self.dtype == torch.uint8:
            return 2.0**-17
        info = torch.finfo(self.dtype)
        return info.smallest_normal * info.eps


# FP16 is stored beside a scale: scaled values reach far below FP16's own range.
FP16 = FloatFormat("fp16", torch.float16, 65504.0)
E4M3 = FloatFormat("e4m3", torch.float8_e4m3fn, 448.0)
E5M2 = FloatFormat("e5m2", torch.float8_e5m2, 57344.0)
# Numbers that are not negative: FP16 without its sign and its last seven bits. It has E4M3's precision over 33 binades,
# where E4M3 has 18: the square of a gradient spans twice as many as the gradient.
E5M3 = FloatFormat("e5m3", torch.uint8, 61440.0)
_NAN = 0xFC  # of E5M3


def cast(values: Tensor, fmt: FloatFormat) -> Tensor:
    """Round ``values`` (any shape, float) to ``fmt``: to nearest even, saturating; NaN stays NaN.

    torch's own cast saturates in some versions and formats only (E4M3 from 2.13 on, E5M2 never), hence the clamp.
    """
    return values.float().clamp(-fmt.max, fmt.max).to(fmt.dtype)


def encode(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Round FP32 ``values`` that a format of this dtype holds to nearest even, contiguous; NaN stays NaN."""
    if dtype != torch.uint8:
        return values.to(dtype, memory_format=torch.contiguous_format)
    bits = values.half().view(torch.int16).int()
    rounded = (bits + 0x3F + ((bits >> 7) & 1)) >> 7
    return torch.where(values.isnan(), _NAN, rounded).to(torch.uint8, memory_format=torch.contiguous_format)


def _plain(data: Tensor) -> Tensor:
    if data.dtype == torch.uint8:
        return (data.to(torch.int16) << 7).view(torch.float16).float()
    return data.float()


@lru_cache(maxsize=16)
def _table(dtype: torch.dtype, device: torch.device) -> Tensor:
    return _plain(torch.arange(256, dtype=torch.uint8).view(dtype)).to(device)


def decode(data: Tensor) -> Tensor:
    """Return the values of a stored tensor as FP32, exactly."""
    if data.element_size() == 1 and data.device.type == "cpu" and not torch.compiler.is_compiling():
        # A lookup is several times faster than torch's conversion on a CPU.
        index = data.contiguous().view(torch.uint8).flatten().int()
        return _table(data.dtype, data.device).index_select(0, index).view(data.shape)
    return _plain(data)

"""The 8-bit float formats, FP16 as a scaled storage format, and the saturating cast into them.

Source: "FP8 Formats for Deep Learning", arXiv:2209.05433 (the OCP E4M3 has no infinity, E5M2 follows IEEE 754).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

_OWN = (torch.uint8, torch.int8)  # dtypes that hold E5M3 and E2M5, for which torch has none


@dataclass(frozen=True)
class FloatFormat:
    """A storage format: its torch dtype and its largest finite value."""

    name: str
    dtype: torch.dtype
    max: float

    @property
    def smallest(self) -> float:
        """The smallest positive value."""
        if self.dtype in _OWN:
            return {torch.uint8: 2.0**-17, torch.int8: 2.0**-5}[self.dtype]
        info = torch.finfo(self.dtype)
        return info.smallest_normal * info.eps


# FP16 is stored beside a scale: scaled values reach far below FP16's own range.
FP16 = FloatFormat("fp16", torch.float16, 65504.0)
E4M3 = FloatFormat("e4m3", torch.float8_e4m3fn, 448.0)
E5M2 = FloatFormat("e5m2", torch.float8_e5m2, 57344.0)
# Numbers that are not negative: FP16 without its sign and its last seven bits. It has E4M3's precision over 33 binades,
# where E4M3 has 18: the square of a gradient spans twice as many as the gradient.
E5M3 = FloatFormat("e5m3", torch.uint8, 61440.0)
# Sign and magnitude, in 32 equal steps below 1 and in steps of a 32nd of each power of two above. Errors are a quarter
# of E4M3's. In Muon's momentum that matters: Newton–Schulz enlarges errors in directions where a matrix is small.
E2M5 = FloatFormat("e2m5", torch.int8, 7.875)
_NAN_E5M3, _NAN_E2M5 = 0xFC, -128
_ONE = 127 << 5  # an FP32 one without its last 18 bits


def cast(values: Tensor, fmt: FloatFormat) -> Tensor:
    """Round ``values`` (any shape, float) to ``fmt``: to nearest even, saturating; NaN stays NaN.

    torch's own cast saturates in some versions and formats only (E4M3 from 2.13 on, E5M2 never), hence the clamp.
    """
    return values.float().clamp(-fmt.max, fmt.max).to(fmt.dtype)


def encode(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Round FP32 ``values`` that a format of this dtype holds to nearest even, contiguous; NaN stays NaN."""
    if dtype not in _OWN:
        return values.to(dtype, memory_format=torch.contiguous_format)
    if dtype == torch.uint8:
        bits = values.half().view(torch.int16).int()
        code = torch.where(values.isnan(), _NAN_E5M3, (bits + 0x3F + ((bits >> 7) & 1)) >> 7)
    else:
        small = values.abs() < 1  # added to 1, these lose as many bits as numbers from 1 on
        bits = (values.abs() + small).view(torch.int32)
        size = ((bits + 0x1FFFF + ((bits >> 18) & 1)) >> 18) - _ONE + torch.where(small, 0, 32)
        code = torch.where(values.isnan(), _NAN_E2M5, torch.where(values < 0, -size, size))
    return code.to(dtype, memory_format=torch.contiguous_format)


def _plain(data: Tensor) -> Tensor:
    if data.dtype == torch.uint8:
        return (data.to(torch.int16) << 7).view(torch.float16).float()
    if data.dtype == torch.int8:
        size = data.int().abs()
        value = torch.where(size < 32, size / 32, ((size + (_ONE - 32)) << 18).view(torch.float32))
        return torch.where(data == _NAN_E2M5, torch.nan, torch.where(data < 0, -value, value))
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

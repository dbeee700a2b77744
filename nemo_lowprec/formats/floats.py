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
        info = torch.finfo(self.dtype)
        return info.smallest_normal * info.eps


# FP16 is stored beside a scale: scaled values reach far below FP16's own range.
FP16 = FloatFormat("fp16", torch.float16, 65504.0)
E4M3 = FloatFormat("e4m3", torch.float8_e4m3fn, 448.0)
E5M2 = FloatFormat("e5m2", torch.float8_e5m2, 57344.0)


def cast(values: Tensor, fmt: FloatFormat) -> Tensor:
    """Round ``values`` (any shape, float) to ``fmt``: to nearest even, saturating; NaN stays NaN.

    torch's own cast saturates in some versions and formats only (E4M3 from 2.13 on, E5M2 never), hence the clamp.
    """
    return values.float().clamp(-fmt.max, fmt.max).to(fmt.dtype)


@lru_cache(maxsize=16)
def _table(dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.arange(256, dtype=torch.uint8).view(dtype).float().to(device)


def decode(data: Tensor) -> Tensor:
    """Return the values of a stored tensor as FP32, exactly."""
    if data.element_size() == 1 and data.device.type == "cpu" and not torch.compiler.is_compiling():
        # A lookup is several times faster than torch's conversion on a CPU.
        index = data.contiguous().view(torch.uint8).flatten().int()
        return _table(data.dtype, data.device).index_select(0, index).view(data.shape)
    return data.float()

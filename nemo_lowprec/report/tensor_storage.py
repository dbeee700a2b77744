"""Formats and bytes of tensors as they are stored."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nemo_lowprec.tensors import QuantizedTensor
from nemo_lowprec.tensors.dtensor import local_shard

_NAMES = {
    torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16", torch.float8_e4m3fn: "fp8",
    torch.float4_e2m1fn_x2: "fp4", torch.uint8: "fp8", torch.int8: "fp8",  # E5M3, E2M5
}  # fmt: skip


def format_of(dtype: torch.dtype) -> str:
    """The chart's name of a dtype."""
    return _NAMES.get(dtype, str(dtype).removeprefix("torch."))


@dataclass(frozen=True)
class Stored:
    """The storage of one tensor, or the contents of one message.

    Attributes:
        format: as in the chart.
        bytes: of the stored elements, scales and exponents; of a sharded tensor, those of this process's shard.
    """

    format: str
    bytes: int


def as_stored(tensor: Any) -> Stored:
    """The format and bytes that ``tensor`` is stored in."""
    local: Tensor = local_shard(tensor)
    if isinstance(local, QuantizedTensor):
        return Stored(format_of(local.parts()[0].dtype), local.stored_bytes())
    return Stored(format_of(local.dtype), local.nbytes)


class Bytes:
    """Formats and bytes of some tensors; those that are None do not count."""

    def __init__(self, tensors: Iterable[Any]) -> None:
        found = [t if isinstance(t, Stored) else as_stored(t) for t in tensors if t is not None]
        self.total = sum(f.bytes for f in found)
        self.formats = "+".join(sorted({f.format for f in found})) or "–"

    def per_param(self, count: int) -> float | None:
        """Bytes for each of ``count`` elements; None where nothing is stored."""
        return self.total / count if self.total else None

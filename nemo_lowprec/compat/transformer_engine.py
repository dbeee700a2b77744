"""Transformer Engine's quantized tensors."""

from __future__ import annotations

from typing import Any

from torch import Tensor


def quantizer_of(weight: Any) -> Any:
    """The quantizer that writes ``weight``."""
    return weight._get_quantizer()


def fp8_data(weight: Any) -> Tensor | None:
    """The FP8 bits of a weight with a scale per tensor, uint8; None for blockwise scales or a transpose alone."""
    data: Tensor | None = getattr(weight, "_data", None)
    return data


def fp8_dtype(weight: Any) -> Any:
    """Transformer Engine's name of the FP8 format of ``weight``."""
    return weight._fp8_dtype


def scale_inv(weight: Any) -> Tensor:
    """FP32 [1]: value = FP8 * scale_inv."""
    scale: Tensor = weight._scale_inv
    return scale

"""Whether this machine has the fused quantization kernels."""

from __future__ import annotations

import importlib
from functools import lru_cache
from types import ModuleType

__all__ = ["fused_kernels"]


@lru_cache(maxsize=1)
def fused_kernels() -> ModuleType | None:
    """The module of fused CUDA kernels; None without Triton or on a GPU that they do not round right on."""
    try:
        kernels = importlib.import_module("nemo_lowprec.formats.triton_cast")
    except ImportError:
        return None
    return kernels if kernels.is_supported() else None

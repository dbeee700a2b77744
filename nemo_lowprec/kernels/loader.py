"""Whether this machine has the fused quantization kernels."""

from __future__ import annotations

import importlib
from functools import lru_cache
from types import ModuleType

__all__ = ["block_kernels", "copy_kernels", "fused_kernels"]


def fused_kernels() -> ModuleType | None:
    """The kernels of per-tensor scaling; None without Triton or on a GPU that they do not round right on."""
    return _load("nemo_lowprec.kernels.triton_cast")


def block_kernels() -> ModuleType | None:
    """The kernels of scaling by blocks of a row; None likewise."""
    return _load("nemo_lowprec.kernels.triton_blocks")


def copy_kernels() -> ModuleType | None:
    """The kernel of half copies; None likewise."""
    return _load("nemo_lowprec.kernels.triton_copy")


@lru_cache(maxsize=3)
def _load(name: str) -> ModuleType | None:
    try:
        cast = importlib.import_module("nemo_lowprec.kernels.triton_cast")
        return importlib.import_module(name) if cast.is_supported() else None
    except ImportError:
        return None

"""Loads the Triton kernels, on machines that have Triton and a GPU on which the kernels round as the reference does."""

from __future__ import annotations

import importlib
from functools import lru_cache
from types import ModuleType


def fused_kernels() -> ModuleType | None:
    """The module of the per-tensor scaling kernels; None without Triton or without a supported GPU."""
    return _load("nemo_lowprec.kernels.triton_cast")


def block_kernels() -> ModuleType | None:
    """The module of the kernels for tensors in blocks; None likewise."""
    return _load("nemo_lowprec.kernels.triton_blocks")


def copy_kernels() -> ModuleType | None:
    """The module of the kernel that copies masters into half weights; None likewise."""
    return _load("nemo_lowprec.kernels.triton_copy")


@lru_cache(maxsize=3)
def _load(name: str) -> ModuleType | None:
    try:
        cast = importlib.import_module("nemo_lowprec.kernels.triton_cast")
        return importlib.import_module(name) if cast.is_supported() else None
    except ImportError:
        return None

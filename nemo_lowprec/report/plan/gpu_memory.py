"""The memory of a GPU that a training has to fit into."""

from __future__ import annotations

import math
from typing import Any

import torch

GIB = 2**30

# GiB that CUDA offers on a GPU with this in its name, which is less than what the GPU is sold with.
GPUS = {
    "H100": 79.11,  # of 80 GB: torch's message in github.com/vllm-project/vllm/issues/27508
    "H200": 139.80,  # of 141 GB: torch's message in benchmarks/results/llama_8b_h200.jsonl
}


def memory_of(fits: Any) -> int:
    """Bytes of a GPU.

    Args:
        fits: GiB, or a name of ``GPUS`` in any case.

    Raises:
        ValueError: neither of the two.
    """
    number = isinstance(fits, int | float) and not isinstance(fits, bool)
    if number and 0 < fits < math.inf:
        return round(fits * GIB)
    if isinstance(fits, str) and fits.upper() in GPUS:
        return round(GPUS[fits.upper()] * GIB)
    raise ValueError(f"{fits!r} is no memory of a GPU: give GiB, such as 80, or one of: {', '.join(GPUS)}.")


def memory_here() -> int | None:
    """Bytes of a GPU of this machine; None without one."""
    return torch.cuda.get_device_properties(0).total_memory if torch.cuda.is_available() else None

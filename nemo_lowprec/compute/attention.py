"""Which kernels ``scaled_dot_product_attention`` takes.

torch prefers FlashAttention 2 to cuDNN's kernels, which are made for Hopper and about twice as fast there; but cuDNN
builds a plan for every new shape, which a run with sequences of many lengths would wait for.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

__all__ = ["check_attention", "prefer_attention"]


def check_attention(attention: str, device: torch.device) -> None:
    """Raise ValueError where ``attention`` cannot be had on ``device``."""
    if attention == "cudnn" and (device.type != "cuda" or torch.cuda.get_device_capability(device) < (9, 0)):
        raise ValueError("attention='cudnn' needs an NVIDIA GPU of compute capability 9.0. Use attention='auto' here.")


@contextmanager
def prefer_attention(attention: str) -> Iterator[None]:
    """Let cuDNN's kernels come first, the others where these cannot."""
    if attention == "auto":
        yield
        return
    order = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    with sdpa_kernel(order, set_priority=True):
        yield

"""Which kernels ``scaled_dot_product_attention`` takes.

torch prefers FlashAttention 2 to cuDNN's kernels, which are made for Hopper and about twice as fast there; but cuDNN
builds a plan for every new shape, which a run with sequences of many lengths would wait for.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from nemo_lowprec.compat.autograd import after_backward
from nemo_lowprec.compat.compiler import outside_graphs
from nemo_lowprec.compat.tensors import tree_leaves


def check_attention(attention: str, device: torch.device) -> None:
    """Raise ValueError where ``attention`` cannot be had on ``device``."""
    if attention == "cudnn" and (device.type != "cuda" or torch.cuda.get_device_capability(device) < (9, 0)):
        raise ValueError("attention='cudnn' needs an NVIDIA GPU of compute capability 9.0. Use attention='auto' here.")


def prefer_attention(attention: str) -> AbstractContextManager[Any]:
    """Let cuDNN's kernels come first, the others where these cannot."""
    order = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    return nullcontext() if attention == "auto" else sdpa_kernel(order, set_priority=True)


def prefer_attention_in(model: nn.Module, attention: str) -> None:
    """``prefer_attention`` in each forward pass of ``model`` and in its backward pass, for a loop of the user's own."""
    if attention != "auto":
        passes = _Passes(attention)
        model.register_forward_pre_hook(passes.enter, prepend=True)
        model.register_forward_hook(passes.after_forward, always_call=True)


class _Passes:
    """Enters the preference in a pass, and leaves it behind.

    Activation checkpointing runs forward passes again in backward, and must find the kernels of the first time.
    """

    def __init__(self, attention: str) -> None:
        self._attention = attention
        self._stack = ExitStack()

    @outside_graphs
    def enter(self, *_: Any) -> None:
        self._stack.close()  # of a pass that an exception has ended
        self._stack.enter_context(prefer_attention(self._attention))

    @outside_graphs
    def after_forward(self, module: nn.Module, args: Any, output: Any) -> None:
        self._stack.close()
        for leaf in tree_leaves(output):
            if isinstance(leaf, Tensor) and leaf.requires_grad:
                leaf.register_hook(self._before_backward)

    def _before_backward(self, _: Tensor) -> None:
        self.enter()
        after_backward(self._stack.close)

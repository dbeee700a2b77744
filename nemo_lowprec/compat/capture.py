"""The capture of CUDA graphs, hidden from the code that is captured."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch

is_capturing = (  # whether the current stream is captured; ``hidden_capture`` hides nothing from it
    torch._C._cuda_isCurrentStreamCapturing if torch.backends.cuda.is_built() else lambda: False
)

_KNOW = ("torch", "triton", "nemo_lowprec")


@contextmanager
def hidden_capture() -> Iterator[None]:
    """Context in which only torch, Triton and this package know that the current stream is captured.

    A model that asks computes otherwise in a capture than outside: transformers hands attention an explicit mask in the
    place of ``is_causal``, which takes three times as long. In this context the model computes as ever; what the model
    reads on the host, which no graph can, ends the capture with an error.
    """
    asked = torch.cuda.is_current_stream_capturing

    def answer() -> bool:
        name = str(sys._getframe(1).f_globals.get("__name__"))
        return name.partition(".")[0] in _KNOW and asked()

    torch.cuda.is_current_stream_capturing = answer
    try:
        yield
    finally:
        torch.cuda.is_current_stream_capturing = asked

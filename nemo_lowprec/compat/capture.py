"""The capture of CUDA graphs, hidden from the code that is captured."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

is_capturing = (  # whether the current stream is captured; ``hidden_capture`` hides nothing from it
    torch._C._cuda_isCurrentStreamCapturing if torch.backends.cuda.is_built() else lambda: False
)

_KNOW = ("torch", "triton", "nemo_lowprec")
_failed: list[torch.cuda.CUDAGraph] = []  # which the allocator of pinned memory asks for as long as the process lives


def end_failed_capture(graph: torch.cuda.CUDAGraph, pool: Any) -> None:
    """Tell the allocator that a capture is over whose ``capture_end`` has failed.

    ``capture_end`` raises before it does so, up to torch 2.13 at least. The allocator believes in a capture then: it
    frees no cached memory, not even where memory runs out, and takes back no tensor that another stream has used.

    Args:
        graph: that was captured on the current device.
        pool: the handle of the graph's memory.
    """
    _failed.append(graph)
    device = torch.cuda.current_device()
    try:
        torch._C._cuda_endAllocateToPool(device, pool)
    except RuntimeError:  # a torch whose ``capture_end`` does it
        return
    torch._C._cuda_releasePool(device, pool)


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

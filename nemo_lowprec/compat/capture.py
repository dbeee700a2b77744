"""The capture of CUDA graphs, hidden from the code that is captured."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch

is_capturing = (  # whether the current stream is captured; ``hidden_capture`` hides nothing from it
    torch._C._cuda_isCurrentStreamCapturing if torch.backends.cuda.is_built() else lambda: False
)

_KNOW = ("torch", "triton", "nemo_lowprec")
_failed: list[torch.cuda.CUDAGraph] = []  # torch's allocator of pinned memory keeps a pointer to each failed graph


def end_capture(graph: torch.cuda.CUDAGraph, pool: Any) -> None:
    """End the capture of ``graph`` on the current stream; torch works as before the capture where it has failed.

    ``capture_end`` raises before it tells the allocator and the generators of random numbers (torch 2.11). The
    allocator then frees no cached memory, not even where memory runs out, and takes back no tensor that another stream
    has used. From the generators neither eager operations nor earlier graphs can draw.

    Args:
        graph: whose capture has begun.
        pool: the handle of the graph's memory.

    Raises:
        RuntimeError: the capture has failed.
    """
    try:
        graph.capture_end()
    except RuntimeError:
        torch.cuda.synchronize()
        _failed.append(graph)
        device = torch.cuda.current_device()
        with suppress(RuntimeError):  # of a torch whose ``capture_end`` tells the allocator in time
            torch._C._cuda_endAllocateToPool(device, pool)
            torch._C._cuda_releasePool(device, pool)
        # The end of any capture tells the generators.
        something, another = torch.empty(1, device=device, dtype=torch.float32), torch.cuda.CUDAGraph()
        another.capture_begin(pool=torch.cuda.graph_pool_handle(), capture_error_mode="thread_local")
        something.zero_()
        another.capture_end()
        raise


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

"""GPU memory that kernels write into, at little host time.

``new``        an uninitialised tensor, at less host time than ``torch.empty`` takes
``zero``       an FP32 zero, [1]. 256 at a time are made, since one takes an allocation and a launch. A zero is handed
               out once, on the stream that it was made on, at a multiple of 16 bytes.
``workspace``  scratch memory of GEMMs on one stream, which run one after another

In the capture of a CUDA graph each piece has memory of its own, and a zero is zeroed whenever the graph is replayed;
in ``capture_of_zeros`` one launch of the graph zeroes 256 of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from nemo_lowprec.compat.capture import is_capturing
from nemo_lowprec.compat.cublas import current_stream
from nemo_lowprec.compat.tensors import empty_strided_cuda
from nemo_lowprec.compat.triton import current_device

_zeros: dict[tuple[int, int], list[Tensor]] = {}
_captured_zeros: dict[tuple[int, int], list[Tensor]] | None = None  # of the graph that is captured
_workspaces: dict[tuple[int, int], Tensor] = {}
_alone = False


def keep_nothing() -> None:
    """From now on each piece has memory of its own, which is freed with it.

    ``torch.compile(mode="reduce-overhead")`` runs a graph once in the memory that it will capture the graph in, and
    refuses to go on where anything but the graph's results is left there.
    """
    global _alone
    _alone = True


def _on(device: int) -> torch.device:
    return torch.device("cuda", device)


def new(device: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """A contiguous, uninitialised tensor."""
    size = len(shape)
    if not 0 < size < 4 or device != current_device():  # type: ignore[misc]
        return torch.empty(shape, dtype=dtype, device=_on(device))
    strides = (shape[1], 1) if size == 2 else (1,) if size == 1 else (shape[1] * shape[2], shape[2], 1)
    return empty_strided_cuda(tuple(shape), strides, dtype)  # type: ignore[no-any-return]


def zero(device: int) -> Tensor:
    """An FP32 zero, [1], which nobody else gets."""
    there = _captured_zeros if _alone or is_capturing() else _zeros
    if there is None:
        return torch.zeros(1, dtype=torch.float32, device=_on(device))
    key = device, current_stream(device)  # type: ignore[misc]
    try:
        return there[key].pop()
    except (KeyError, IndexError):
        with torch.inference_mode(False):  # later zeros are saved for backward
            made = torch.zeros(256, 4, dtype=torch.float32, device=_on(device))[:, 0]
        zeros = there[key] = list(made.unsafe_split(1))
        return zeros.pop()


@contextmanager
def capture_of_zeros() -> Iterator[None]:
    """Context of the capture of one CUDA graph, one launch of which zeroes 256 zeros."""
    global _captured_zeros
    _captured_zeros = {}
    try:
        yield
    finally:
        _captured_zeros = None


def workspace(device: int, stream: int, size: int) -> int:
    """The address of ``size`` bytes for a kernel that is launched next on ``stream``, the current one."""
    if _alone or is_capturing():  # what is launched later may take the memory
        return torch.empty(size, dtype=torch.uint8, device=_on(device)).data_ptr()
    there = _workspaces.get((device, stream))
    if there is None or there.numel() < size:
        there = _workspaces[device, stream] = torch.empty(size, dtype=torch.uint8, device=_on(device))
    return there.data_ptr()

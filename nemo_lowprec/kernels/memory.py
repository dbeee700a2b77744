"""GPU memory that kernels write into, at little host time.

``new``                      an uninitialised tensor, at less host time than ``Tensor.new_empty`` takes
``uninitialised``, ``zero``  an FP32 number, [1], on a device: 256 at a time are made, since one takes an allocation or
                             a launch. A number is handed out once, on the stream that it was made on, at a multiple of
                             16 bytes.
``workspace``                scratch memory of GEMMs on one stream, which run one after another

In the capture of a CUDA graph each piece has memory of its own, and a zero is zeroed whenever the graph is replayed.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from nemo_lowprec.compat.capture import is_capturing
from nemo_lowprec.compat.cublas import current_stream

_KEPT = 4096
_like: dict[tuple[int, tuple[int, ...], torch.dtype], Tensor] = {}
_uninitialised: dict[tuple[int, int], list[Tensor]] = {}
_zeros: dict[tuple[int, int], list[Tensor]] = {}
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
    key = device, shape, dtype
    like = _like.get(key)
    if like is None:
        if _alone or is_capturing():
            return torch.empty(shape, dtype=dtype, device=_on(device))
        if len(_like) >= _KEPT:
            _like.clear()
        # One element, seen in every place: a shape without memory.
        like = _like[key] = torch.empty(1, dtype=dtype, device=_on(device)).expand(shape)
    return torch.empty_like(like, memory_format=torch.contiguous_format)


def _number(pool: dict[tuple[int, int], list[Tensor]], make: Callable[..., Tensor], device: int) -> Tensor:
    if _alone or is_capturing():
        return make(1, dtype=torch.float32, device=_on(device))
    key = device, current_stream(device)  # type: ignore[misc]
    try:
        return pool[key].pop()
    except (KeyError, IndexError):
        with torch.inference_mode(False):  # later numbers are saved for backward
            numbers = list(make(256, 4, dtype=torch.float32, device=_on(device))[:, 0].split(1))
        pool[key] = numbers
        return numbers.pop()


uninitialised = partial(_number, _uninitialised, torch.empty)
zero = partial(_number, _zeros, torch.zeros)


def workspace(device: int, stream: int, size: int) -> int:
    """The address of ``size`` bytes for a kernel that is launched next on ``stream``, the current one."""
    if _alone or is_capturing():  # what is launched later may take the memory
        return torch.empty(size, dtype=torch.uint8, device=_on(device)).data_ptr()
    there = _workspaces.get((device, stream))
    if there is None or there.numel() < size:
        there = _workspaces[device, stream] = torch.empty(size, dtype=torch.uint8, device=_on(device))
    return there.data_ptr()

"""FP32 numbers on a GPU for kernels to write into, made 256 at a time: each by itself takes an allocation or a launch.

A number is handed out once, on the stream that it was made on, and belongs to the caller. Its address is a multiple of
16 bytes. In a CUDA graph's capture a number has memory of its own, and a zero is zeroed whenever the graph is replayed.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from nemo_lowprec.compat.capture import is_capturing
from nemo_lowprec.compat.cublas import current_stream

_uninitialised: dict[tuple[int, int], list[Tensor]] = {}
_zeros: dict[tuple[int, int], list[Tensor]] = {}
_alone = False


def make_scalars_alone() -> None:
    """From now on each number has memory of its own, as the results of operators in ``torch.compile``'s graphs must."""
    global _alone
    _alone = True


def uninitialised(device: int) -> Tensor:
    """FP32 [1]."""
    if not (_alone or is_capturing()):
        there = _uninitialised.get((device, current_stream(device)))  # type: ignore[misc]
        if there:
            return there.pop()
    return _one(device, _uninitialised, torch.empty)


def zero(device: int) -> Tensor:
    """FP32 [1], 0."""
    if not (_alone or is_capturing()):
        there = _zeros.get((device, current_stream(device)))  # type: ignore[misc]
        if there:
            return there.pop()
    return _one(device, _zeros, torch.zeros)


def _one(device: int, pool: dict[tuple[int, int], list[Tensor]], make: Callable[..., Tensor]) -> Tensor:
    if _alone or is_capturing():
        return make(1, device=torch.device("cuda", device))
    key = device, current_stream(device)  # type: ignore[misc]
    there = pool.get(key)
    if not there:
        with torch.inference_mode(False):  # later ones are saved for backward
            numbers = make(256, 4, device=torch.device("cuda", device))[:, 0]
            there = pool[key] = list(numbers.split(1))
    return there.pop()

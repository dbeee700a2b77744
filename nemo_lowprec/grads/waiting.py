"""Gradients of small matrices wait in high precision, and are stored in FP8 together.

One at a time each takes the host 30 us, which a small layer's backward pass does not take otherwise.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from torch import Tensor

from nemo_lowprec.compat.autograd import after_backward, current_backward
from nemo_lowprec.compat.capture import is_capturing
from nemo_lowprec.compat.cublas import current_stream
from nemo_lowprec.tensors import GradientTensor

SMALL = 2**19  # bytes of a gradient that may wait
LIMIT = 2**22  # bytes that wait on a device at most


class WaitingGradients:
    """The gradients that wait, by device and dtype. They are ``param.grad``, until they are stored."""

    def __init__(self) -> None:
        self._waiting: dict[Any, list[tuple[Tensor, Tensor]]] = defaultdict(list)
        self._bytes: dict[Any, int] = defaultdict(int)
        self._pass: int | None = None

    def take(self, param: Tensor, grad: Tensor) -> bool:
        """Whether ``grad``, which is ``param.grad`` now, waits from now on. Called in backward."""
        size, device, graph = grad.nbytes, grad.get_device(), current_backward()
        if size > SMALL or graph < 0 or type(grad) is not Tensor:
            return False
        hooks: Any = param._post_accumulate_grad_hooks  # type: ignore[attr-defined]
        if len(hooks) > 1:  # another one reads what is stored
            return False
        if device >= 0 and (current_stream(device) or is_capturing()):  # type: ignore[misc]
            return False
        if graph != self._pass:
            self.store()  # of a pass that has failed, or of one around this one
            after_backward(self.store)
            self._pass = graph
        key = device, grad.dtype
        self._waiting[key].append((param, grad))
        self._bytes[key] += size
        if self._bytes[key] >= LIMIT:
            self._store(key)
        return True

    def store(self) -> None:
        """Store all gradients that wait."""
        self._pass = None
        for key in list(self._waiting):
            self._store(key)

    @torch.no_grad()
    def _store(self, key: tuple[int, torch.dtype]) -> None:
        waiting, device = self._waiting.pop(key), key[0]
        del self._bytes[key]
        there = [(param, grad) for param, grad in waiting if param.grad is grad]
        if not there:
            return
        if device < 0 or not current_stream(device):  # type: ignore[misc]
            return _quantize(there)
        # The gradients were made on the default stream.
        current, default = torch.cuda.current_stream(device), torch.cuda.default_stream(device)
        with torch.cuda.stream(default):
            _quantize(there)
        current.wait_stream(default)


def _quantize(gradients: list[tuple[Tensor, Tensor]]) -> None:
    stored = GradientTensor.from_floats([grad for _, grad in gradients])
    for (param, _), quantized in zip(gradients, stored, strict=True):
        param.grad = quantized

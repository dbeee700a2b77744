"""Gradients of small matrices wait in high precision, and are stored in FP8 together.

One at a time each takes the host 30 us, a third of a small layer's backward pass. Together they are one launch, into
memory that is kept.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from nemo_lowprec.compat.autograd import after_backward, current_backward
from nemo_lowprec.compat.capture import is_capturing
from nemo_lowprec.compat.cublas import current_stream
from nemo_lowprec.compat.tensors import accumulated_hooks
from nemo_lowprec.tensors.reused_gradients import ReusedGradients

SMALL = 2**20  # bytes of a gradient that may wait
LIMIT = 2**23  # bytes that wait on a device at most
KEPT = 2**26  # bytes of stored gradients whose memory is kept from pass to pass


class WaitingGradients:
    """The gradients that wait, by device and dtype. They are ``param.grad``, until they are stored."""

    def __init__(self) -> None:
        self._waiting: dict[Any, list[tuple[Tensor, Tensor]]] = defaultdict(list)
        self._bytes: dict[Any, int] = defaultdict(int)
        self._pass: int | None = None
        self._stored: dict[Any, ReusedGradients] = {}
        self._kept = 0

    def take(self, param: Tensor, grad: Tensor) -> bool:
        """Whether ``grad``, which is ``param.grad`` now, waits from now on. Called in backward."""
        size, device, graph = grad.nbytes, grad.get_device(), current_backward()
        if size > SMALL or graph < 0 or type(grad) is not Tensor:
            return False
        if len(accumulated_hooks(param)) > 1:  # the other hook reads the stored gradient
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
        params, grads = zip(*there, strict=True)
        if device < 0 or not current_stream(device):  # type: ignore[misc]
            return self._quantize(params, grads)
        # The gradients were made on the default stream.
        current, default = torch.cuda.current_stream(device), torch.cuda.default_stream(device)
        with torch.cuda.stream(default):
            self._quantize(params, grads)
        current.wait_stream(default)

    def _quantize(self, params: Sequence[Tensor], grads: Sequence[Tensor]) -> None:
        key = tuple(map(id, params))
        stored = self._stored.get(key)
        if stored is None or not stored.fit(grads):
            stored = ReusedGradients(grads)
            self._kept += stored.nbytes
            if self._kept > KEPT:
                self._stored, self._kept = {}, stored.nbytes
            self._stored[key] = stored
        for param, quantized in zip(params, stored.store(grads), strict=True):
            param.grad = quantized

"""The flag of one optimizer's non-finite gradients, on the device and, after a copy in the background, on the host."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer


class FoundInf:
    """Whether one optimizer's gradients are not finite.

    The flag is copied to the host in the background. The kernels of the step read the flag on the device and follow
    the kernels of the backward pass without a gap. Only ``bool`` waits for the copy.

    Args:
        on_device: FP32 scalar on the gradients' device, 0 where all gradients are finite.
    """

    def __init__(self, on_device: Tensor) -> None:
        self.on_device = on_device
        self._on_host = on_device
        self._copied: torch.cuda.Event | None = None
        if on_device.is_cuda:
            self._on_host = torch.empty((), pin_memory=True, dtype=torch.float32).copy_(on_device, non_blocking=True)
            self._copied = torch.cuda.Event()
            self._copied.record(torch.cuda.current_stream(on_device.device))

    def __reduce__(self) -> tuple[Any, ...]:
        return FoundInf, (torch.tensor(float(bool(self)), dtype=torch.float32),)

    def __bool__(self) -> bool:
        if self._copied is not None:
            self._copied.synchronize()
        return bool(self._on_host)

    @contextmanager
    def handed_to(self, optimizer: Optimizer, divisor: Tensor | None = None) -> Iterator[None]:
        """Context in which ``optimizer.step()`` skips by itself, as under GradScaler, and divides by ``divisor``."""
        optimizer.grad_scale, optimizer.found_inf = divisor, self.on_device  # type: ignore[attr-defined]
        try:
            yield
        finally:
            del optimizer.grad_scale, optimizer.found_inf  # type: ignore[attr-defined]

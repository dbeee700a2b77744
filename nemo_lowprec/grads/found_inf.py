"""What the search for gradients that are not finite has found, known to the device before the host knows it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.optim import Optimizer


class FoundInf:
    """Whether one optimizer's gradients are not finite.

    It is copied to the host in the background, so that the kernels of the step, which read it on the device, follow
    those of the backward pass without a gap: the host waits for it only when ``bool`` asks.

    Args:
        on_device: FP32 scalar on the gradients' device, not 0 where one is not finite.
    """

    def __init__(self, on_device: Tensor) -> None:
        self.on_device = on_device
        self._on_host = on_device
        self._copied: torch.cuda.Event | None = None
        if on_device.is_cuda:
            self._on_host = torch.empty((), pin_memory=True).copy_(on_device, non_blocking=True)
            self._copied = torch.cuda.Event()
            self._copied.record(torch.cuda.current_stream(on_device.device))

    def __bool__(self) -> bool:
        if self._copied is not None:
            self._copied.synchronize()
        return bool(self._on_host)

    @contextmanager
    def handed_to(self, optimizer: Optimizer) -> Iterator[None]:
        """Within, ``optimizer.step()`` skips by itself, as under torch's GradScaler after its ``unscale_``."""
        optimizer.grad_scale, optimizer.found_inf = None, self.on_device  # type: ignore[attr-defined]
        try:
            yield
        finally:
            del optimizer.grad_scale, optimizer.found_inf  # type: ignore[attr-defined]

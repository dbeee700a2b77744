"""The error that gradients take on their way between processes in FP8."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from nemo_lowprec.comm.wire import exact_mean
from nemo_lowprec.formats.block_scale_128 import dequantize_rows
from nemo_lowprec.observers import Observer

_BLOCKS = 1024  # of each message


class WireErrors(Observer):
    """Adds up the error of the means that this process has made, over the first blocks of each message.

    The gradients are in FP8 before they are sent, so that only the mean is rounded.

    Attributes:
        sums: FP64 [2], squares of the exact means and of their errors.
    """

    def __init__(self, device: torch.device) -> None:
        self.sums = torch.zeros(2, dtype=torch.float64, device=device)

    def clear(self) -> None:
        """Forget the sums."""
        self.sums.zero_()

    @torch.no_grad()
    def mean(self, received: Tensor, own: tuple[int, Tensor] | None, layout: Any, mean: Tensor) -> None:
        blocks = min(_BLOCKS, layout.chunk)
        exact = exact_mean(received, layout, own, blocks)
        data, exponents = (part[0, :blocks] for part in layout.parts(mean.view(1, -1)))
        stored = dequantize_rows(data.view(torch.float8_e4m3fn), exponents.reshape(-1, 1))
        error = torch.where(exact.isfinite() & stored.isfinite(), exact - stored, 0.0)
        exact = torch.where(exact.isfinite(), exact, 0.0)
        self.sums += torch.stack([exact.double().square().sum(), error.double().square().sum()])

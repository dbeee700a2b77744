"""Measures steps of copies of the user's model on the GPU: of the plain model, and of one at a level."""

from __future__ import annotations

import statistics
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from nemo_lowprec.loops import prepare
from nemo_lowprec.options import LossScaleConfig
from nemo_lowprec.report.loss import loss_of

_PLAIN_WARMUP, _WARMUP, _STEPS = 3, 14, 5  # CUDA graphs of a level come at the 13th step at the latest


def time_plain(copy: nn.Module, batch: Any) -> float:
    """µs of a forward and backward pass of ``batch`` in BF16.

    Args:
        copy: the model with BF16 weights; its gradients are gone afterwards.
        batch: on the device of ``copy``.
    """

    def step() -> None:
        _pass(copy, batch)
        copy.zero_grad()

    return _time(step, next(copy.parameters()).device, _PLAIN_WARMUP)


def time_level(copy: nn.Module, batch: Any, level: str, **options: Any) -> float:
    """µs of a training step of ``batch`` at a level, with AdamW at a learning rate of 0.

    Args:
        copy: the model with BF16 weights, which is converted.
        batch: on the device of ``copy``.
        level, options: of a plugin; the loss scale does not count.
    """
    device = next(copy.parameters()).device
    optimizer: Any = torch.optim.AdamW(copy.parameters(), lr=0.0, fused=device.type == "cuda")
    of_loop = {name: v for name, v in options.items() if name not in ("half", *LossScaleConfig.arguments())}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about layers that are not converted, which advise lists
        copy, optimizer = prepare(copy, optimizer, level, **of_loop)

    def step() -> None:
        _pass(copy, batch)
        optimizer.step()
        optimizer.zero_grad()

    return _time(step, device, _WARMUP)


def _pass(copy: nn.Module, batch: Any) -> None:
    with torch.autocast(next(copy.parameters()).device.type, torch.bfloat16):
        loss = loss_of(copy, batch)
    loss.backward()  # type: ignore[no-untyped-call]


def _time(step: Callable[[], Any], device: torch.device, warmup: int) -> float:
    """The median time of a step, µs."""
    for _ in range(warmup):
        step()
    found = []
    for _ in range(_STEPS):
        _synchronize(device)
        start = time.perf_counter()
        step()
        _synchronize(device)
        found.append((time.perf_counter() - start) * 1e6)
    return statistics.median(found)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)

"""Measures steps of copies of the user's model on the GPU: of the plain model, and of one at a level."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from nemo_lowprec.engine import Engine
from nemo_lowprec.options import Options
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


def time_level(copy: nn.Module, batch: Any, options: Options) -> float:
    """µs of a training step of ``batch`` at a level, with AdamW at a learning rate of 0.

    Args:
        copy: the model with BF16 weights, which is converted.
        batch: on the device of ``copy``.
        options: of the level.
    """
    device = next(copy.parameters()).device
    optimizer = torch.optim.AdamW(copy.parameters(), lr=0.0, fused=device.type == "cuda")
    engine = Engine(options)
    engine.convert(copy, device)
    engine.settle()
    engine.attach(optimizer)

    def step() -> None:
        with engine.forward_context():
            loss = loss_of(copy, batch)
        loss = engine.step.scale(loss)
        with engine.backward_context():
            loss.backward()  # type: ignore[no-untyped-call]
        engine.step.unscale(optimizer)
        engine.step.run(optimizer)
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

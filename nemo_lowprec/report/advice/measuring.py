"""Measures steps of copies of the user's model on the GPU: of the plain model, and of one at a level."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn

from nemo_lowprec.chart.options import Options
from nemo_lowprec.engine import Engine
from nemo_lowprec.report.loss import loss_of

_PLAIN_WARMUP, _WARMUP, _STEPS = 3, 14, 5  # CUDA graphs of a level come at the 13th step at the latest


class MeasuredStep(NamedTuple):
    """A training step.

    Attributes:
        us: its time.
        peak: bytes of the GPU that the training holds at most from the second step on, while CUDA graphs are captured
            and afterwards, with the bytes that graphs keep; 0 on a CPU. Workspaces of libraries that were there before
            are not counted.
    """

    us: float
    peak: int


def time_plain(copy: nn.Module, batch: Any) -> float:
    """µs of a forward and backward pass of ``batch`` in BF16.

    Args:
        copy: the model with BF16 weights; its gradients are gone afterwards.
        batch: on the device of ``copy``.
    """

    def step() -> None:
        _pass(copy, batch)
        copy.zero_grad()

    _repeat(step, _PLAIN_WARMUP)
    return _time(step, next(copy.parameters()).device)


def measure_level(copy: nn.Module, batch: Any, options: Options) -> MeasuredStep:
    """A training step of ``batch`` at a level, with AdamW at a learning rate of 0.

    Args:
        copy: the model with BF16 weights, which is converted.
        batch: on the device of ``copy``.
        options: of the level.
    """
    device = next(copy.parameters()).device
    others = _allocated(device) - sum(t.nbytes for t in {*copy.parameters(), *copy.buffers()})
    idle = idle_in_graphs()
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

    step()  # makes the optimizer's states
    _reset_peak(device)
    _repeat(step, _WARMUP - 1)
    while_captured = _peak(device)
    _reset_peak(device)
    us = _time(step, device)
    if device.type != "cuda":
        return MeasuredStep(us, 0)
    return MeasuredStep(us, max(while_captured, _peak(device) + idle_in_graphs() - idle) - others)


def idle_in_graphs() -> int:
    """Bytes that CUDA graphs keep for temporary tensors. In a replay the allocator does not count them as allocated."""
    segments = torch.cuda.memory_snapshot() if torch.cuda.is_available() else []
    return sum(s["total_size"] - s["allocated_size"] for s in segments if tuple(s["segment_pool_id"]) != (0, 0))


def release() -> None:
    """Give back the memory of objects that nobody holds any more."""
    for _ in range(2):  # after a training with CUDA graphs the second collection still finds objects
        gc.collect()
    torch.cuda.empty_cache()


def _allocated(device: torch.device) -> int:
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def _peak(device: torch.device) -> int:
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0


def _reset_peak(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def _pass(copy: nn.Module, batch: Any) -> None:
    with torch.autocast(next(copy.parameters()).device.type, torch.bfloat16):
        loss = loss_of(copy, batch)
    loss.backward()  # type: ignore[no-untyped-call]


def _repeat(step: Callable[[], Any], times: int) -> None:
    for _ in range(times):
        step()


def _time(step: Callable[[], Any], device: torch.device) -> float:
    """The median time of a step, µs."""
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

"""Measures the GPU time of one layer's GEMMs, forward and backward, in FP8 with quantization and in half precision.

A layer [M, K] to [M, N] in FP8: both orientations of the input and of the output gradient, quantized, and fprop, dgrad
and wgrad on one backend; in half precision: the three GEMMs of ``nn.Linear``. Both have FP32 weight gradients.
Quantized weights are made once a step and are not counted. Each figure is the GPU's time of a CUDA graph of several
runs over rotating tensors, divided by their number: no host in between, no tensor left in the cache.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import torch

from nemo_lowprec.chart.recipe import Recipe
from nemo_lowprec.compute.backends.base import Backend, half_matmul
from nemo_lowprec.compute.operands import OPERANDS, Operand, new_histories, operand_of

_REPEATS = 11
_CACHE = 128 * 2**20  # bytes that the runs of a graph go through


def warm_operands(recipe: Recipe) -> dict[str, Operand]:
    """The operands of one layer, by kind; with delayed scaling their scales are 1 and in use."""
    histories = new_histories(recipe)
    if histories is None:
        return {kind: operand_of(recipe, kind) for kind in OPERANDS}
    histories.add_all({kind: operand_of(recipe, kind).fmt for kind in OPERANDS})
    histories.to(torch.device("cuda"))
    for slot in histories.slots.values():
        slot.cold = False
    return {kind: operand_of(recipe, kind, histories.slots[kind]) for kind in OPERANDS}


def layer_times(
    rows: int, ins: int, outs: int, backend: Backend, operands: dict[str, Operand], half: torch.dtype = torch.bfloat16
) -> tuple[float, float]:
    """Measure a layer [rows, ins] to [rows, outs] on the current GPU.

    Args:
        rows, ins, outs: sizes; FP8 GEMMs take multiples of 16.
        backend: runs the GEMMs in FP8.
        operands: from ``warm_operands``.
        half: dtype of the tensors.

    Returns:
        µs of the three GEMMs in FP8 with quantization, and in ``half``.
    """
    size = 2 * (rows * ins + rows * outs + ins * outs)
    sets = max(2, min(16, _CACHE // size + 1))
    both: dict[str, Any] = {"rowwise": True, "columnwise": True}
    shapes = {"input": (rows, ins), "weight": (outs, ins), "grad_output": (rows, outs)}
    fp8: list[Callable[[], Any]] = []
    plain: list[Callable[[], Any]] = []
    for _ in range(sets):
        t = {kind: torch.randn(shape, device="cuda", dtype=half) for kind, shape in shapes.items()}
        weight = backend.quantize(t["weight"], operands["weight"], record=False, **both)

        def in_fp8(t: dict[str, torch.Tensor] = t, weight: Any = weight) -> None:
            x = backend.quantize(t["input"], operands["input"], record=True, **both)
            backend.fprop(x, weight, None, half)
            dy = backend.quantize(t["grad_output"], operands["grad_output"], record=True, **both)
            backend.dgrad(dy, weight, half)
            backend.wgrad(dy, x, torch.float32)

        def in_half(t: dict[str, torch.Tensor] = t) -> None:
            half_matmul(t["input"], t["weight"].t(), half)
            half_matmul(t["grad_output"], t["weight"], half)
            half_matmul(t["grad_output"].t(), t["input"], torch.float32)

        fp8.append(in_fp8)
        plain.append(in_half)
    one, other = _microseconds([_captured(fp8), _captured(plain)], sets)
    return one, other


def _captured(runs: list[Callable[[], Any]]) -> torch.cuda.CUDAGraph:
    """A graph of ``runs``."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for run in runs:
            run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for run in runs:
            run()
    return graph


def _microseconds(graphs: list[torch.cuda.CUDAGraph], runs: int) -> list[float]:
    """Median GPU time of one of the ``runs`` of each graph. The graphs take turns: the GPU's speed varies."""
    times: list[list[float]] = [[] for _ in graphs]
    for _ in range(_REPEATS):
        for graph, own in zip(graphs, times, strict=True):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()  # type: ignore[no-untyped-call]
            graph.replay()
            end.record()  # type: ignore[no-untyped-call]
            end.synchronize()  # type: ignore[no-untyped-call]
            own.append(start.elapsed_time(end) * 1e3 / runs)  # type: ignore[no-untyped-call]
    return [statistics.median(own) for own in times]

"""GPU time of the GEMMs of one linear layer, in FP8 with quantization and in BF16, over a grid of sizes.

    python -m benchmarks.gemm_times

A layer [M, K] to [M, N] in FP8: both orientations of the input and of the output gradient, quantized with delayed
scales, and fprop, dgrad, wgrad on the ``torch`` backend; in BF16: the three GEMMs of ``nn.Linear``. Both have FP32
weight gradients. Quantized weights are made once a step and are not counted. Each figure is the GPU's time of a CUDA
graph of several runs over rotating tensors, divided by their number: no host in between, no tensor left in the cache.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from itertools import product
from typing import Any

import torch

from benchmarks.record import Record, arguments
from nemo_lowprec.compute.backends.base import half_matmul
from nemo_lowprec.compute.backends.scaled_mm import ScaledMMBackend
from nemo_lowprec.compute.operands import OPERANDS, Operand, new_histories, operand_of
from nemo_lowprec.options import Recipe

ROWS = (256, 512, 1024, 2048, 4096, 8192, 16384, 32768)
SIDES = (256, 512, 1024, 2048, 4096, 8192, 16384)
LARGEST = 2**40  # multiplications of one GEMM
REPEATS = 11
CACHE = 128 * 2**20  # bytes that the runs of a graph go through


def captured(runs: list[Callable[[], Any]]) -> torch.cuda.CUDAGraph:
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


def microseconds(graphs: list[torch.cuda.CUDAGraph], runs: int) -> list[float]:
    """Median GPU time of one of the ``runs`` of each graph. The graphs take turns: the GPU's speed varies."""
    times: list[list[float]] = [[] for _ in graphs]
    for _ in range(REPEATS):
        for graph, own in zip(graphs, times, strict=True):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            own.append(start.elapsed_time(end) * 1e3 / runs)
    return [statistics.median(own) for own in times]


def warm_operands() -> dict[str, Operand]:
    """Operands with scales of 1 that are in use."""
    recipe = Recipe("delayed")
    histories = new_histories(recipe)
    assert histories is not None
    histories.add_all({kind: operand_of(recipe, kind).fmt for kind in OPERANDS})
    histories.to(torch.device("cuda"))
    for slot in histories.slots.values():
        slot.cold = False
    return {kind: operand_of(recipe, kind, histories.slots[kind]) for kind in OPERANDS}


def layer(rows: int, ins: int, outs: int, operands: dict[str, Operand]) -> list[float]:
    """Microseconds of the layer in FP8 and in BF16."""
    backend = ScaledMMBackend()
    size = 2 * (rows * ins + rows * outs + ins * outs)
    sets = max(2, min(16, CACHE // size + 1))
    both: dict[str, Any] = {"rowwise": True, "columnwise": True}
    shapes = {"input": (rows, ins), "weight": (outs, ins), "grad_output": (rows, outs)}
    fp8: list[Callable[[], Any]] = []
    half: list[Callable[[], Any]] = []
    for _ in range(sets):
        t = {kind: torch.randn(shape, device="cuda", dtype=torch.bfloat16) for kind, shape in shapes.items()}
        weight = backend.quantize(t["weight"], operands["weight"], record=False, **both)

        def in_fp8(t=t, weight=weight) -> None:
            x = backend.quantize(t["input"], operands["input"], record=True, **both)
            backend.fprop(x, weight, None, torch.bfloat16)
            dy = backend.quantize(t["grad_output"], operands["grad_output"], record=True, **both)
            backend.dgrad(dy, weight, torch.bfloat16)
            backend.wgrad(dy, x, torch.float32)

        def in_half(t=t) -> None:
            half_matmul(t["input"], t["weight"].t(), torch.bfloat16)
            half_matmul(t["grad_output"], t["weight"], torch.bfloat16)
            half_matmul(t["grad_output"].t(), t["input"], torch.float32)

        fp8.append(in_fp8)
        half.append(in_half)
    return microseconds([captured(fp8), captured(half)], sets)


def main() -> None:
    gpu = torch.cuda.get_device_name().split()[1].lower()
    args = arguments(__doc__.split("\n")[0], f"gemm_times_{gpu}.jsonl").parse_args()
    record = Record(args.out)
    operands = warm_operands()
    for rows, ins, outs in product(ROWS, SIDES, SIDES):
        if rows * ins * outs > LARGEST:
            continue
        fp8, half = layer(rows, ins, outs, operands)
        record.add(benchmark="gemm_times", m=rows, k=ins, n=outs, fp8_us=round(fp8, 2), bf16_us=round(half, 2))
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()

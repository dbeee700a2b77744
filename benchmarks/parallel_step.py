"""Whole training steps on several GPUs of a machine, Llama-8B-shaped: our levels and strategies beside Lightning's.

    python -m benchmarks.parallel_step

Every contestant has processes of its own, one a GPU, which train the same model (``benchmarks/llama.py``) with fused
AdamW on other batches each. A figure is the median over rounds of five steps, of the slowest process; tokens are those
of all GPUs. ``of one GPU`` is the throughput beside that of as many single GPUs at the same level.
"""

from __future__ import annotations

import argparse
import os
import statistics
import traceback
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import nemo_lowprec
from benchmarks.fsdp2 import Float8Gathered, HalfGathered, Sharded
from benchmarks.llama import BATCH, SEQUENCE, Llama
from benchmarks.record import Record, arguments, earlier
from benchmarks.train_step import ROUND, under_trainer
from nemo_lowprec import CHART

Run = Callable[[int], list[float]]


def ours(level: str, strategy: str, **options: Any) -> Callable[[dict[str, Any]], Run]:
    def build(processes: dict[str, Any]) -> Run:
        plugin = getattr(nemo_lowprec, level)(**options)
        return lambda rounds: under_trainer(
            rounds, torch.float32, plugins=plugin, **(processes | ({"strategy": strategy} if processes else {}))
        )

    return build


def lightning(dtype: torch.dtype, strategy: str = "ddp", **options: Any) -> Callable[[dict[str, Any]], Run]:
    return lambda processes: lambda rounds: under_trainer(rounds, dtype, **options, **processes, strategy=strategy)


def fsdp2(kind: type[Llama], dtype: torch.dtype, precision: str) -> Callable[[dict[str, Any]], Run]:
    def build(processes: dict[str, Any]) -> Run:
        from lightning.pytorch.strategies import ModelParallelStrategy

        strategy = ModelParallelStrategy(data_parallel_size=processes["devices"], tensor_parallel_size=1)
        return lambda rounds: under_trainer(
            rounds, dtype, kind=kind, precision=precision, strategy=strategy, **processes
        )

    return build


def transformer_engine(processes: dict[str, Any]) -> Run:
    from lightning.pytorch.plugins.precision import TransformerEnginePrecision

    plugin = TransformerEnginePrecision(weights_dtype=torch.bfloat16)
    return lambda rounds: under_trainer(rounds, torch.bfloat16, plugins=plugin, **processes, strategy="ddp")


FAST = {"attention": "cudnn", "convert": "*"}
CONTESTANTS: dict[str, Callable[[dict[str, Any]], Run]] = {
    "msamp_o2, ddp": ours("msamp_o2", "ddp", **FAST),
    "msamp_o2, lowprec_ddp": ours("msamp_o2", "lowprec_ddp", **FAST),
    "lightning TransformerEnginePrecision, bf16 weights, no masters, ddp": transformer_engine,
    "msamp_o3, lowprec_ddp": ours("msamp_o3", "lowprec_ddp", **FAST),
    "msamp_o1, lowprec_ddp": ours("msamp_o1", "lowprec_ddp", **FAST),
    "bf16_with_fp8_mixed, ddp": ours("bf16_with_fp8_mixed", "ddp", **FAST),
    "bf16_with_fp8_mixed, lowprec_ddp": ours("bf16_with_fp8_mixed", "lowprec_ddp", **FAST),
    "bf16_mixed, lowprec_ddp": ours("bf16_mixed", "lowprec_ddp"),
    "fp16_mixed, lowprec_ddp": ours("fp16_mixed", "lowprec_ddp"),
    "te_fp8, ddp": ours("te_fp8", "ddp", **FAST),
    "te_fp8, lowprec_ddp": ours("te_fp8", "lowprec_ddp", **FAST),
    **{
        f"{level}, sharded": ours(level, "lowprec_sharded", **(FAST if CHART[level].has_fp8 else {}))
        for level in ("msamp_o3", "msamp_o2", "msamp_o1", "bf16_with_fp8_mixed", "bf16_mixed", "fp16_mixed", "te_fp8")
    },
    "bf16_with_fp8_mixed fp8_params, sharded": ours("bf16_with_fp8_mixed", "lowprec_sharded", fp8_params=True, **FAST),
    "lightning FSDP2, bf16-true, sharded": fsdp2(Sharded, torch.bfloat16, "bf16-true"),
    "lightning FSDP2, FP32 shards gathered in bf16, sharded": fsdp2(HalfGathered, torch.float32, "32-true"),
    "torchao float8 all-gather, FP32 shards, compiled layers, sharded": fsdp2(Float8Gathered, torch.float32, "32-true"),
    "lightning bf16-mixed, ddp": lightning(torch.float32, precision="bf16-mixed"),
    "lightning bf16-true, ddp": lightning(torch.bfloat16, precision="bf16-true"),
}


def run(rank: int, world: int, name: str, rounds: int, port: int, results: Any) -> None:
    """One process of one contestant; the first reports (seconds a step of the slowest, peak GiB of the largest)."""
    import transformer_engine.pytorch  # noqa: F401  (before anything touches CUDA)

    processes: dict[str, Any] = {}
    if world > 1:
        numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world, "GROUP_RANK": 0}
        os.environ.update({key: str(value) for key, value in numbers.items()})
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), TORCHELASTIC_RUN_ID="benchmark")
        processes = {"devices": world, "use_distributed_sampler": False}
    torch.cuda.set_device(rank)
    seconds = CONTESTANTS[name](processes)(rounds)
    found = torch.tensor([*seconds, torch.cuda.max_memory_allocated() / 2**30], device="cuda")
    if world > 1:
        dist.all_reduce(found, dist.ReduceOp.MAX)
    if rank == 0:
        results.put(found.tolist())
    if world > 1:
        dist.destroy_process_group()


def measure(name: str, world: int, args: argparse.Namespace) -> tuple[list[float], float]:
    results = mp.get_context("spawn").SimpleQueue()
    mp.spawn(run, (world, name, args.rounds, args.port, results), nprocs=world)
    *seconds, peak = results.get()
    return seconds, peak


def main() -> None:
    parser = arguments(__doc__.split("\n")[0], "parallel_step_h200.jsonl")
    parser.add_argument("--rounds", type=int, default=3, help=f"rounds of {ROUND} steps a contestant")
    parser.add_argument("--only", nargs="*", help="contestants whose name holds one of these")
    parser.add_argument("--port", type=int, default=29512)
    args = parser.parse_args()
    gpus = torch.cuda.device_count()
    kept = [line for line in earlier(args.out, "parallel_step") if "error" not in line]
    have = {(line["name"], line["gpus"]) for line in kept if "name" in line}
    record = Record(args.out, kept)
    alone: dict[str, float] = {line["level"]: line["tokens_per_s"] for line in kept if line.get("gpus") == 1}
    for name in CONTESTANTS:
        if args.only and not any(part in name for part in args.only):
            continue
        level = name.rpartition(",")[0]
        for world in (1, gpus):
            if (world == 1 and (level not in CHART or level in alone)) or (name, world) in have:
                continue
            try:
                seconds, peak = measure(name, world, args)
            except Exception as error:
                traceback.print_exc()
                record.add(benchmark="parallel_step", name=name, gpus=world, error=f"{type(error).__name__}"[:300])
                continue
            median = statistics.median(seconds)
            rate = world * BATCH * SEQUENCE / median
            figures = {"tokens_per_s": round(rate), "ms": round(median * 1e3, 2), "peak_gib": round(peak, 2)}
            figures |= {"ms_min": round(min(seconds) * 1e3, 2), "ms_max": round(max(seconds) * 1e3, 2)}
            if world == 1:
                alone[level] = rate
            elif level in alone:
                figures["of_one_gpu"] = round(rate / (world * alone[level]), 4)
            record.add(benchmark="parallel_step", name=name, level=level, gpus=world, **figures)


if __name__ == "__main__":
    main()

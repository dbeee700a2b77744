"""Whole training steps on several GPUs of a machine, Llama-8B-shaped: our levels and strategies beside Lightning's.

    python -m benchmarks.parallel_step
    NCCL_P2P_DISABLE=1 NCCL_SHM_DISABLE=1 python -m benchmarks.parallel_step --out FILE  # over sockets
    NCCL_IB_DISABLE=1 python -m benchmarks.parallel_step --machines 2 --out FILE  # four GPUs or more
    NCCL_IB_DISABLE=1 python -m benchmarks.parallel_step --machines 2 --processes 4 --out FILE  # two GPUs

All contestants train the same model (``benchmarks/llama.py``) with fused AdamW, one after the other in the same
processes, one a GPU, on other batches each. A figure is the median over rounds of five steps, of the slowest process;
tokens are those of all GPUs. ``of one GPU`` is the throughput beside that of as many single GPUs at the same level:
the levels are first trained alone, on all GPUs at a time. A file of results that is there is continued: a contestant is
measured again where its figure has other processes, machines or links.

With ``--machines`` the processes are on as many machines, between which NCCL goes through the network, and ``at once``
averages FP8 gradients over all processes at once. ``--processes`` may be a multiple of the number of GPUs: each machine
then has all GPUs, which take turns between the machines. NCCL's environment variables stand in each figure.
"""

from __future__ import annotations

import gc
import os
import queue
import statistics
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import lightning.pytorch as pl
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import nemo_lowprec
from benchmarks.fsdp2 import Float8Gathered, HalfGathered, Sharded
from benchmarks.levels import HOPPER
from benchmarks.llama import BATCH, SEQUENCE, Llama
from benchmarks.processes import environment, links, put_on_machine
from benchmarks.record import Record, arguments, earlier
from benchmarks.train_step import ROUND, Figures, under_trainer
from nemo_lowprec import CHART
from nemo_lowprec.comm.topology import Machines
from nemo_lowprec.observers import NOBODY
from nemo_lowprec.report.tensor_storage import format_of
from nemo_lowprec.report.traffic import Traffic

Contestant = Callable[[int, dict[str, Any]], Figures]
"""Given rounds and the Trainer's arguments for the processes: seconds a step, by round."""

STRATEGIES = ("ddp", "lowprec_ddp", "lowprec_sharded")


class Sent(pl.Callback):
    """Bytes that this process sends in the second step, by what sends them and in which format."""

    def __init__(self) -> None:
        self.bytes: Counter[str] = Counter()
        self._traffic: Traffic | None = None

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, index: int) -> None:
        if index == 1:
            engine = getattr(trainer.precision_plugin, "engine", None)
            observers = NOBODY if engine is None else engine.observers
            self._traffic = Traffic(lambda tensor: tensor.numel() == 1, observers).__enter__()

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, index: int) -> None:
        if self._traffic is not None:
            self._traffic.__exit__(None, None, None)
            for one in self._traffic.sent:
                # Bytes are FP8, or weights of several formats that FSDP2 gathers together.
                format_ = "bytes" if one.dtype == torch.uint8 else format_of(one.dtype)
                self.bytes[f"{one.kind} {format_}"] += one.bytes
            self._traffic = None


def ours(level: str, **options: Any) -> Contestant:
    if CHART[level].has_fp8:
        options = {"attention": "cudnn", "convert": "*"} | options

    def train(rounds: int, processes: dict[str, Any]) -> Figures:
        return under_trainer(rounds, torch.float32, plugins=getattr(nemo_lowprec, level)(**options), **processes)

    return train


def at_once(train: Contestant) -> Contestant:
    """``train`` with gradients that are averaged over the processes of all machines at once."""

    def flat(rounds: int, processes: dict[str, Any]) -> Figures:
        with patch.object(Machines, "of", lambda group: None):
            return train(rounds, processes)

    return flat


def lightning(dtype: torch.dtype, **options: Any) -> Contestant:
    return lambda rounds, processes: under_trainer(rounds, dtype, **options, **processes)


def fsdp2(kind: type[Llama], dtype: torch.dtype, precision: str) -> Contestant:
    def train(rounds: int, processes: dict[str, Any]) -> Figures:
        from lightning.pytorch.strategies import ModelParallelStrategy

        strategy = ModelParallelStrategy(
            data_parallel_size=processes["devices"] * processes["num_nodes"], tensor_parallel_size=1
        )
        return under_trainer(rounds, dtype, kind=kind, precision=precision, **(processes | {"strategy": strategy}))

    return train


def transformer_engine(rounds: int, processes: dict[str, Any]) -> Figures:
    from lightning.pytorch.plugins.precision import TransformerEnginePrecision

    plugin = TransformerEnginePrecision(weights_dtype=torch.bfloat16)
    return under_trainer(rounds, torch.bfloat16, plugins=plugin, **processes)


def contestants(machines: int = 1) -> dict[str, tuple[str, Contestant]]:
    """(strategy, contestant) by name; the strategy of those that bring one of their own is not read."""
    rivals = {
        "lightning TransformerEnginePrecision, bf16 weights, no masters, ddp": ("ddp", transformer_engine),
        "lightning bf16-mixed, ddp": ("ddp", lightning(torch.float32, precision="bf16-mixed")),
        "lightning bf16-true, ddp": ("ddp", lightning(torch.bfloat16, precision="bf16-true")),
        "lightning FSDP2, bf16-true": ("", fsdp2(Sharded, torch.bfloat16, "bf16-true")),
        "lightning FSDP2, FP32 shards gathered in bf16": ("", fsdp2(HalfGathered, torch.float32, "32-true")),
    }
    field = {f"{level}, {strategy}": (strategy, ours(level)) for strategy in STRATEGIES for level in HOPPER}
    if machines > 1:
        in_fp8 = [level for level in HOPPER if CHART[level].comm == "fp8"]
        field |= {f"{level}, lowprec_ddp at once": ("lowprec_ddp", at_once(ours(level))) for level in in_fp8}
    with_fp8_params = ours("bf16_with_fp8_mixed", fp8_params=True)
    # Last, as it changes how torch compiles in this process.
    torchao = fsdp2(Float8Gathered, torch.float32, "32-true")
    return rivals | field | {
        "bf16_with_fp8_mixed fp8_params, lowprec_sharded": ("lowprec_sharded", with_fp8_params),
        "torchao float8 all-gather, FP32 shards, compiled layers, FSDP2": ("", torchao),
    }  # fmt: skip


def work(
    rank: int, processes: int, names: list[str], alone: bool, rounds: int, port: int, machines: int, results: Any
) -> None:
    """One process: puts (name, error, seconds a step of the slowest process and peak GiB of the largest, bytes).

    The bytes are those that it sent in a step, by what sent them.
    """
    nodes = max(1, processes // torch.cuda.device_count())
    torch.cuda.set_device(rank % torch.cuda.device_count())
    if not alone:
        os.environ.update(environment(rank, processes, port, nodes))
        put_on_machine(rank, processes, machines)
    for name in names[rank::processes] if alone else names:
        gc.collect()
        torch.cuda.empty_cache()
        left = torch.cuda.memory_allocated()
        sent = Sent()
        # What is compiled is compiled once more within a mode that looks at operations.
        looks = [] if alone or "compiled" in name else [sent]
        try:
            if alone:
                found = ours(name)(rounds, {"devices": [rank], "callbacks": looks})
            else:
                strategy, train = contestants(machines)[name]
                there = {"devices": processes // nodes, "num_nodes": nodes, "strategy": strategy}
                found = train(rounds, there | {"use_distributed_sampler": False, "callbacks": looks})
        except Exception as error:
            results.put((name, f"{type(error).__name__}: {error}"[:300], [], {}))
            raise
        worst = torch.tensor([*found.seconds, (found.peak - left) / 2**30], device="cuda")
        if not alone:
            dist.all_reduce(worst, dist.ReduceOp.MAX)
        if alone or rank == 0:
            results.put((name, None, worst.tolist(), dict(sent.bytes)))
    if not alone and dist.is_initialized():
        dist.destroy_process_group()


def measured(
    names: list[str], processes: int, alone: bool, rounds: int, port: int, machines: int = 1
) -> Iterator[tuple[str, str | None, list[float], dict[str, int]]]:
    """What ``work`` puts, for every name; after an error the others go on in new processes."""
    left = list(names)
    while left:
        results = mp.get_context("spawn").Queue()
        context = mp.spawn(work, (processes, left, alone, rounds, port, machines, results), processes, join=False)
        error = None
        while left and error is None:
            try:
                name, error, found, sent = results.get(timeout=1)
            except queue.Empty:
                if not any(p.is_alive() for p in context.processes):
                    raise RuntimeError(f"All processes are gone, and {left} were not measured.") from None
                continue
            left.remove(name)
            yield name, error, found, sent
        try:
            while not context.join():
                pass
        except Exception:
            traceback.print_exc()


def over_same_links(figure: dict[str, Any], processes: int, here: dict[str, Any]) -> bool:
    """Whether a figure is of ``processes`` processes, with the machines and the links turned off that ``here`` has.

    Args:
        here: as ``links`` returns it.
    """

    def of(found: dict[str, Any]) -> tuple[int, dict[str, str]]:
        off = {name: value for name, value in found.get("nccl", {}).items() if name.endswith("_DISABLE")}
        return found.get("machines", 1), off

    return figure.get("processes", figure["gpus"]) == processes and of(figure) == of(here)


def main() -> None:
    parser = arguments(__doc__.split("\n")[0], "parallel_step_h200.jsonl")
    parser.add_argument("--rounds", type=int, default=3, help=f"rounds of {ROUND} steps a contestant")
    parser.add_argument("--only", nargs="*", help="contestants whose name holds one of these")
    parser.add_argument("--machines", type=int, default=1)
    parser.add_argument("--processes", type=int, help="by default one a GPU")
    parser.add_argument("--port", type=int, default=29512)
    args = parser.parse_args()
    gpus = torch.cuda.device_count()
    processes = args.processes or gpus
    if processes not in (gpus, gpus * args.machines):
        parser.error(f"--processes is {gpus}, or {gpus} on each of --machines")
    kept = [line for line in earlier(args.out, "parallel_step") if "error" not in line]
    figures = [line for line in kept if "name" in line]
    chosen = [name for name in contestants(args.machines) if not args.only or any(part in name for part in args.only)]
    done = {f["name"] for f in figures if over_same_links(f, processes, links(args.machines))}
    chosen = [name for name in chosen if name not in done]
    alone = {f["level"]: f["tokens_per_s"] for f in figures if f["gpus"] == 1 and "processes" not in f}
    levels = {name: name.rpartition(",")[0] for name in chosen}
    baselines = [level for level in HOPPER if level in levels.values() and level not in alone]
    record = Record(args.out, kept)

    def note(
        name: str, level: str | None, count: int, error: str | None, found: list[float], sent: dict[str, int]
    ) -> float:
        on = {"gpus": min(count, gpus)} | ({"processes": count} if count > gpus else {})
        if error is not None:
            record.add(benchmark="parallel_step", name=name, **on, error=error)
            return 0.0
        *seconds, peak = found
        median = statistics.median(seconds)
        rate = count * BATCH * SEQUENCE / median
        line: dict[str, Any] = {"tokens_per_s": round(rate), "ms": round(median * 1e3, 2), "peak_gib": round(peak, 2)}
        line |= {"ms_min": round(min(seconds) * 1e3, 2), "ms_max": round(max(seconds) * 1e3, 2)}
        if 1 < count <= gpus and alone.get(level or ""):
            line["of_one_gpu"] = round(rate / (count * alone[level or ""]), 4)
        if count > 1:
            line |= links(args.machines)
        if sent:
            line |= {"bytes_sent": sum(sent.values()), "sent": sent}
        record.add(benchmark="parallel_step", name=name, level=level, **on, **line)
        return rate

    for name, *found in measured(baselines, gpus, True, args.rounds, args.port):
        alone[name] = note(name, name, 1, *found)
    for name, *found in measured(chosen, processes, False, args.rounds, args.port, args.machines):
        note(name, levels[name] if levels[name] in HOPPER else None, processes, *found)


if __name__ == "__main__":
    main()

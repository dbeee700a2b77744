"""Whole training steps of the models that most people train: BF16 autocast, Transformer Engine, torchao and our levels.

    python -m benchmarks.everyday
    python -m benchmarks.everyday --continue --compiled

A step is forward, loss, backward, the optimizer's step and ``zero_grad``, in a plain loop. Each model has a process of
its own, which holds BF16 autocast, eager, all the time and the other contestants one after the other: they need not fit
into the GPU's memory together. Rounds of steps of either take turns, and each figure is a median over rounds.

``x`` is the eager model's wall time in the same rounds (``beside_ms``) divided by the contestant's, above 1 where the
contestant is faster. ``passes_x`` is the same of ``passes_ms``, the time of forward, loss and backward from their first
to their last kernel, and ``gpu_x`` of ``gpu_ms``, the time that kernels and copies take on the GPU in a step
(torch.profiler's durations, without the gaps); ``gpu_kinds`` divides ``gpu_ms`` by the kinds of kernels
(``kernel_kinds.py``). ``ms_before_profile`` of the eager model is its wall time before the first profile, ``loss`` the
one of step ``WARMUP``, and ``setup_s`` the time to make a contestant and to warm it up, compilation included. A
contestant that fails, or whose loss is not finite, has ``error`` in the place of figures.

Without ``--contestants`` those that compile run only with ``--compiled``; ``--continue`` keeps the figures of the file
of results and measures those that are missing. Without a GPU the models are small.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from benchmarks.everyday_contestants import CONTESTANTS, EAGER, Contestant, Training, forget, names
from benchmarks.everyday_models import MODELS, Batch, Task, loss_of
from benchmarks.kernel_kinds import milliseconds
from benchmarks.measure import DEVICE, kernels_of, release, synchronize
from benchmarks.record import Record, arguments, earlier

WARMUP = 16  # steps: convert="auto" decides, and graphs come at the 13th at the latest: a model, its body, its blocks
PROFILED = 2  # steps


class Runner:
    """A contestant with its batch.

    Attributes:
        rounds: milliseconds of a step, of each round.
        passes: milliseconds of a step's forward and backward pass, of each round.
    """

    def __init__(self, contestant: Contestant, task: Task, batch: Batch) -> None:
        start = time.perf_counter()
        self.training: Training = contestant.make(task)
        self.batch = batch
        self.rounds: list[float] = []
        self.passes: list[float] = []
        self._marks: list[tuple[Any, Any]] = []
        for _ in range(WARMUP):
            loss = self.step()
        self.loss = round(loss.item(), 4)
        if not math.isfinite(self.loss):
            raise ArithmeticError(f"the loss is {self.loss} after {WARMUP} steps")
        self.setup_s = round(time.perf_counter() - start, 1)
        release()

    def of_setup(self) -> dict[str, Any]:
        parameters = sum(p.numel() for p in self.training.model.parameters())
        return {"loss": self.loss, "setup_s": self.setup_s, "parameters": parameters}

    def step(self) -> Tensor:
        self.training.before()
        start = _mark()
        with self.training.context():
            loss = loss_of(self.training.model, self.batch)
        loss.backward()
        self._marks.append((start, _mark()))
        self.training.optimizer.step()
        self.training.optimizer.zero_grad()
        return loss.detach()

    def round(self, steps: int) -> float:
        """Milliseconds a step."""
        synchronize()
        self._marks.clear()
        start = time.perf_counter()
        for _ in range(steps):
            self.step()
        synchronize()
        self.rounds.append((time.perf_counter() - start) / steps * 1e3)
        self.passes.append(statistics.mean(_between(*marks) for marks in self._marks))
        return self.rounds[-1]

    def gpu(self) -> dict[str, Any]:
        """Milliseconds of a step in which the GPU has work, where kernels do not overlap, and its parts.

        Without a GPU ``gpu_ms`` is None, and there are no parts.
        """
        if DEVICE.type != "cuda":
            return {"gpu_ms": None}
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            for _ in range(PROFILED):
                self.step()
            synchronize()
        kinds = milliseconds((e.name, e.self_device_time_total / PROFILED) for e in kernels_of(profiler))
        return {"gpu_ms": round(sum(kinds.values()), 3), "gpu_kinds": {k: round(ms, 3) for k, ms in kinds.items()}}


def _mark() -> Any:
    """This place in the GPU's work; without a GPU, this moment."""
    if DEVICE.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _between(start: Any, end: Any) -> float:
    """Milliseconds between two marks."""
    return float(start.elapsed_time(end)) if DEVICE.type == "cuda" else float(end - start) * 1e3


def _milliseconds(rounds: list[float]) -> dict[str, Any]:
    ms, least, most = statistics.median(rounds), min(rounds), max(rounds)
    return {"ms": round(ms, 3), "ms_min": round(least, 3), "ms_max": round(most, 3), "rounds": len(rounds)}


def _failed(name: str, error: Exception) -> dict[str, Any]:
    traceback.print_exception(error)
    return {"name": name, "error": f"{type(error).__name__}: {error}"[:300]}


def in_turns(eager: Runner, other: Runner, rounds: int, steps: int) -> tuple[float, float]:
    """Run both, the first one of a round being the second of the next.

    Returns:
        ``eager``'s medians: milliseconds of a step, and of its forward and backward pass.
    """
    beside, passes = [], []
    for runner in (eager, other):
        runner.step()  # which finds the memory that another contestant had
    for turn in range(rounds):
        for runner in (eager, other) if turn % 2 == 0 else (other, eager):
            ms = runner.round(steps)
            if runner is eager:
                beside.append(ms)
                passes.append(eager.passes[-1])
    return statistics.median(beside), statistics.median(passes)


def measure(
    model: str, chosen: list[str], rounds: int, steps: int | None = None, seconds: float = 1.0
) -> Iterator[dict[str, Any]]:
    """The figures of the chosen contestants of a model; those of the eager one come last."""
    torch.manual_seed(0)
    try:
        task = MODELS[model]
        batch = task.batch()
        eager = Runner(CONTESTANTS[EAGER], task, batch)
        before = eager.round(3)
    except Exception as error:
        yield from (_failed(name, error) for name in chosen)
        return
    steps = steps or max(2, math.ceil(seconds * 1e3 / before))
    eager.rounds.clear()
    eager.passes.clear()
    eager_gpu = eager.gpu()
    for name in chosen:
        if name == EAGER:
            continue
        try:
            other = Runner(CONTESTANTS[name], task, batch)
            beside, passes_beside = in_turns(eager, other, rounds, steps)
            figure, passes = _milliseconds(other.rounds), statistics.median(other.passes)
            gpu = other.gpu()
            yield {
                "name": name, **figure, "steps": steps, "beside_ms": round(beside, 3),
                "x": round(beside / figure["ms"], 3), "passes_ms": round(passes, 3),
                "passes_x": round(passes_beside / passes, 3), **gpu,
                "gpu_x": round(eager_gpu["gpu_ms"] / gpu["gpu_ms"], 3) if gpu["gpu_ms"] else None, **other.of_setup(),
            }  # fmt: skip
        except Exception as error:
            yield _failed(name, error)
        other = None  # type: ignore[assignment]
        forget()
    if EAGER in chosen:
        for _ in range(rounds - len(eager.rounds)):
            eager.round(steps)
        yield {
            "name": EAGER, **_milliseconds(eager.rounds), "steps": steps, "x": 1.0,
            "passes_ms": round(statistics.median(eager.passes), 3), "passes_x": 1.0, **eager_gpu, "gpu_x": 1.0,
            "ms_before_profile": round(before, 3), **eager.of_setup(),
        }  # fmt: skip


def in_a_process(model: str, chosen: list[str], args: argparse.Namespace, record: Record) -> None:
    """``measure`` in a process of its own; what the process could not say is an error of the contestant."""
    start, missing = time.perf_counter(), list(chosen)
    command = [sys.executable, "-m", "benchmarks.everyday", "--rounds", str(args.rounds)]
    command += ["--seconds", str(args.seconds)]
    command += ["--steps", str(args.steps)] if args.steps else []
    with subprocess.Popen([*command, "--one", model, json.dumps(chosen)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith('{"name"'):
                figure = json.loads(line)
                missing.remove(figure["name"])
                record.add(benchmark="everyday", model=model, **figure)
            else:
                print(line, end="", flush=True)
    for name in missing:
        record.add(benchmark="everyday", model=model, name=name, error=f"the process ended with {process.returncode}")
    print(f"{model}: {time.perf_counter() - start:.0f} s", flush=True)


def main() -> None:
    parser = arguments(__doc__.split("\n")[0], "everyday.jsonl")
    parser.add_argument("--models", nargs="*", help="models whose name holds one of these")
    parser.add_argument("--contestants", nargs="*", help="contestants of these names, or that hold them")
    parser.add_argument("--compiled", action="store_true", help="those that compile, too")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=1.0, help="of the eager model's steps in a round, at least 2")
    parser.add_argument("--steps", type=int, help="steps of a round, in the place of --seconds")
    parser.add_argument("--continue", dest="go_on", action="store_true", help="keep the figures that are there")
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        model, chosen = args.one[0], json.loads(args.one[1])
        for figure in measure(model, chosen, args.rounds, args.steps, args.seconds):
            print(json.dumps(figure), flush=True)
        return
    kept = [line for line in earlier(args.out, "everyday") if "error" not in line] if args.go_on else []
    have = {(line["model"], line["name"]) for line in kept if "name" in line}
    jobs = {}
    for model, task in MODELS.items():
        if not args.models or any(part in model for part in args.models):
            jobs[model] = [n for n in names(task, args.contestants, args.compiled) if (model, n) not in have]
    if not any(jobs.values()):
        parser.error("There is nothing to measure: no model and contestant has these names, or all have figures.")
    record = Record(args.out, kept)
    for model, chosen in jobs.items():
        if chosen:
            in_a_process(model, chosen, args, record)


if __name__ == "__main__":
    main()

"""What the monitor costs: training steps with it and without, of the models of ``benchmarks.everyday``.

    python -m benchmarks.monitor

A model is trained in a plain loop at a level. Rounds take turns: the monitor watches, or the monitor is taken off the
engine's observers. A round has a whole number of samples, and at least ``--least`` seconds. A figure has three pairs of
rounds, or more, up to ``--rounds``, as far as ``--seconds`` have room for them. ``ms`` is the median wall time of a
step without the monitor, ``overhead_percent`` the median over pairs of rounds of what the monitor adds, and
``sample_ms`` the same for a sampled step. ``gpu_percent`` is the part of the GPU's time: kernels of one sampled step
beside one plain step, over ``every`` steps. ``first_s`` is the time of the first two sampled steps, which compile
kernels and capture graphs.

``peak_mib`` are the peaks of reserved memory of two trainings from their first step, one that is watched and one that
is not: memory of a CUDA graph does not count as allocated while the graph is replayed.
"""

from __future__ import annotations

import math
import statistics
import tempfile
import time
from contextlib import ExitStack
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.everyday import Runner
from benchmarks.everyday_contestants import CONTESTANTS, OURS, Contestant, Training, forget
from benchmarks.everyday_models import MODELS, Task
from benchmarks.measure import DEVICE, MIB, kernels_of, peaks, reset_peak, synchronize
from benchmarks.record import Record, arguments
from nemo_lowprec import monitor
from nemo_lowprec.engine import Engine

EVERY = (50, 10)
CHOSEN = ("Llama 100M", "timm ViT-B", "Llama 1.1B, 1 x", "timm ViT-L", "Llama 1.1B, 4 x", "Llama 8B-shaped")
LEVELS = ("bf16_with_fp8_mixed", "msamp_o2")


class Watched:
    """A training that the monitor watches, or not."""

    def __init__(self, runner: Runner, every: int) -> None:
        self.runner, self.every = runner, every
        engine = Engine.of(runner.training.model)
        assert engine is not None
        self._observers = engine.observers
        self._folder = tempfile.TemporaryDirectory()
        self._watch = monitor(runner.training.model, self._folder.name, every)
        self._monitor = self._watch._monitor
        start = time.perf_counter()
        self.steps(2 * every)  # the second step and two samples: the last one runs as a graph
        self.first_s = time.perf_counter() - start

    def steps(self, count: int) -> None:
        for _ in range(count):
            self._watch.add_loss(self.runner.step())
        synchronize()

    def round(self, count: int, watches: bool) -> float:
        """Milliseconds a step."""
        synchronize()
        start = time.perf_counter()
        if watches:
            self.steps(count)
        else:
            self._observers.remove(self._monitor)
            for _ in range(count):
                self.runner.step()
            synchronize()
            self._observers.add(self._monitor)
        return (time.perf_counter() - start) / count * 1e3

    def gpu(self) -> float | None:
        """GPU milliseconds that a sampled step takes beyond a plain one."""
        if DEVICE.type != "cuda":
            return None
        found = []
        self.steps(self.every - 1 - self._monitor.steps % self.every)  # type: ignore[union-attr]
        for _ in range(2):  # the step that is sampled, and the next one
            with profile(activities=[ProfilerActivity.CUDA]) as profiler:
                self.steps(1)
            found.append(sum(event.self_device_time_total for event in kernels_of(profiler)) / 1e3)
        return found[0] - found[1]

    def close(self) -> None:
        self._watch.close()
        self._folder.cleanup()


def rounds_within(seconds: float, first: float, most: int) -> int:
    """How many pairs of rounds ``seconds`` have room for: at least 3 and at most ``most``.

    Args:
        seconds: for all rounds.
        first: seconds of the first plain round; a watched round takes about as long.
        most: pairs of rounds.
    """
    return min(most, max(3, int(seconds / (2 * first))))


def measure(model: str, level: str, every: int, rounds: int, least: float, seconds: float) -> dict[str, Any]:
    """The figures of a model at a level. ``least``: seconds of a round; the rest as on the command line."""
    torch.manual_seed(0)
    task = MODELS[model]
    runner = Runner(CONTESTANTS[OURS + level], task, task.batch())
    watched = Watched(runner, every)
    count = every * max(1, math.ceil(least / (watched.round(every, watches=False) / 1e3 * every)))
    plain: list[float] = []
    extra: list[float] = []
    while len(plain) < rounds:
        order = (False, True) if len(plain) % 2 == 0 else (True, False)
        found = {watches: watched.round(count, watches) for watches in order}
        plain.append(found[False])
        extra.append(found[True] - found[False])
        rounds = rounds_within(seconds, plain[0] * count / 1e3, rounds)
    gpu = watched.gpu()
    watched.close()
    ms = statistics.median(plain)
    percent = statistics.median(100 * more / base for more, base in zip(extra, plain, strict=True))
    return {
        "ms": round(ms, 3),
        "overhead_percent": round(percent, 2),
        "overheads": [round(100 * more / base, 2) for more, base in zip(extra, plain, strict=True)],
        "sample_ms": round(statistics.median(extra) * every, 3),
        "gpu_percent": None if gpu is None else round(100 * gpu / every / ms, 2),
        "first_s": round(watched.first_s, 2),
        "rounds": rounds,
        "steps": count,
    }


def peak(model: str, level: str, every: int | None) -> float:
    """The peak of reserved memory in MiB, up to a sample that runs in a graph. ``every``: None for no monitor."""
    torch.manual_seed(0)
    task, plain = MODELS[model], CONTESTANTS[OURS + level]
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:

        def make(task: Task) -> Training:
            training = plain.make(task)
            if every is not None:
                stack.enter_context(monitor(training.model, folder, every))
            return training

        reset_peak()
        Runner(Contestant(make), task, task.batch()).round(3 * EVERY[-1])
        return round(peaks()[1] / MIB, 1)


def main() -> None:
    parser = arguments(__doc__.split("\n")[0], "monitor_h200.jsonl")
    parser.add_argument("--models", nargs="*", default=CHOSEN, help="models whose name holds one of these")
    parser.add_argument("--levels", nargs="*", default=LEVELS)
    parser.add_argument("--every", nargs="*", type=int, default=EVERY)
    parser.add_argument("--rounds", type=int, default=5, help="most pairs of rounds of a figure")
    parser.add_argument("--seconds", type=float, default=20, help="of all rounds, if three pairs take less")
    parser.add_argument("--least", type=float, default=1, help="seconds of a round")
    args = parser.parse_args()
    record = Record(args.out)
    for model in MODELS:
        if not any(part in model for part in args.models):
            continue
        for level in args.levels:
            peaks_of = {}
            for name, sampled in (("plain", None), ("watched", EVERY[-1])):
                peaks_of[name] = peak(model, level, sampled)
                forget()
            record.add(benchmark="monitor_memory", model=model, level=level, peak_mib=peaks_of)
            for every in args.every:
                figure = measure(model, level, every, args.rounds, args.least, args.seconds)
                record.add(benchmark="monitor", model=model, level=level, every=every, **figure)
                forget()


if __name__ == "__main__":
    main()

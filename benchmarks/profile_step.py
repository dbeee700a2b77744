"""Where the time of a training step goes: kernels by GPU time, or Python functions by host time.

    python -m benchmarks.profile_step "Llama 8B" "nemo_lowprec msamp_o2, FP8 head"
    python -m benchmarks.profile_step "Llama 1.1B, 1 x 512" "nemo_lowprec msamp_o2" --host
    python -m benchmarks.profile_step "Llama 8B" "msamp_o2, head=fp8, attention=cudnn" --trainer

The models and contestants are those of ``benchmarks.everyday``. The first of each whose name is, or holds, the given
one is measured, in a plain loop. With ``--trainer`` a level is measured under the Lightning Trainer, with options as in
``benchmarks.llama_8b``. Without a GPU there is nothing to say without ``--host``.
"""

from __future__ import annotations

import argparse
import cProfile
import io
import pstats
import time
from collections import Counter
from collections.abc import Iterable
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from benchmarks.everyday_contestants import CONTESTANTS
from benchmarks.everyday_models import MODELS, loss_of
from benchmarks.measure import DEVICE, kernels_of, stay_on_gpu, synchronize
from nemo_lowprec.plugins import LEVELS

WARMUP, STEPS, LINES = 16, 4, 45  # CUDA graphs come at the 13th step at the latest


def chosen(name: str, there: Iterable[str]) -> str:
    """``name``, or the first of ``there`` that holds ``name``."""
    names = list(there)
    found = [name] if name in names else [one for one in names if name in one]
    if not found:
        raise SystemExit(f"{name} is none of: {', '.join(names)}.")
    return found[0]


class Kernels:
    """Milliseconds and launches a step of each kernel, and how long the GPU waits before them."""

    def start(self) -> None:
        synchronize()
        self._profiler = profile(activities=[ProfilerActivity.CUDA])
        self._profiler.__enter__()

    def stop(self) -> str:
        synchronize()
        self._profiler.__exit__(None, None, None)
        work = kernels_of(self._profiler)
        ms, launches = Counter[str](), Counter[str]()
        for event in work:
            ms[event.name] += event.self_device_time_total / STEPS / 1e3
            launches[event.name] += 1
        span = max((e.time_range.end for e in work), default=0) - min((e.time_range.start for e in work), default=0)
        lines = [f"{t:9.3f} ms {launches[name] / STEPS:7.1f}  {name[:100]}" for name, t in ms.most_common(LINES)]
        total = f"{sum(ms.values()):9.3f} ms {len(work) / STEPS:7.1f}  all, in {span / STEPS / 1e3:.3f} ms"
        return "\n".join([total, *lines, "", "Before which kernels the GPU waits:", *_gaps(work)])


def _gaps(work: list[Any]) -> list[str]:
    """How long, in ms a step, and how often the GPU waits before each kernel; the longest wait first."""
    ms, waits, end = Counter[str](), Counter[str](), min((e.time_range.start for e in work), default=0)
    for event in sorted(work, key=lambda e: e.time_range.start):
        gap = event.time_range.start - end
        if gap > 0:
            ms[event.name] += gap / STEPS / 1e3
            waits[event.name] += 1
        end = max(end, event.time_range.end)
    rows = [f"{t:9.3f} ms {waits[name] / STEPS:7.1f}  {name[:100]}" for name, t in ms.most_common(LINES // 3)]
    return [f"{sum(ms.values()):9.3f} ms {sum(waits.values()) / STEPS:7.1f}  all", *rows]


class Functions:
    """Host time of Python functions, those that they call counted in."""

    def start(self) -> None:
        synchronize()
        # Backward in this thread, where its hooks are seen.
        self._threads = torch.autograd.set_multithreading_enabled(False)
        self._profiler, self._started = cProfile.Profile(), time.perf_counter()
        self._profiler.enable()

    def stop(self) -> str:
        self._profiler.disable()
        ms = (time.perf_counter() - self._started) / STEPS * 1e3
        synchronize()
        torch.autograd.set_multithreading_enabled(self._threads.prev)
        out = io.StringIO()
        pstats.Stats(self._profiler, stream=out).sort_stats("cumulative").print_stats(2 * LINES)
        rows = [line for line in out.getvalue().splitlines() if line.split("/")[0].strip().split(" ")[0].isdigit()]
        return "\n".join([f"{ms:.2f} ms a step on the host, slowed by the profiler; {STEPS} steps:", *rows])


def in_a_loop(model: str, contestant: str, look: Kernels | Functions) -> str:
    """Look at steps of a plain loop."""
    torch.manual_seed(0)
    batch = MODELS[model].batch()
    training = CONTESTANTS[contestant].make(MODELS[model])
    for index in range(WARMUP + STEPS):
        if index == WARMUP:
            look.start()
        training.before()
        with training.context():
            loss = loss_of(training.model, batch)
        loss.backward()
        training.optimizer.step()
        training.optimizer.zero_grad()
    return look.stop()


class _Module(pl.LightningModule):
    def __init__(self, model: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        with DEVICE:
            self.model = MODELS[model].model().train()
        self.batch = MODELS[model].batch()

    def training_step(self, _: Any, index: int) -> Tensor:
        return loss_of(self.model, self.batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-5, fused=DEVICE.type == "cuda")


class _Watch(pl.Callback):
    def __init__(self, look: Kernels | Functions) -> None:
        self.look, self.found = look, ""

    def on_train_batch_start(self, trainer: pl.Trainer, module: pl.LightningModule, batch: Any, index: int) -> None:
        if index == WARMUP:
            self.look.start()
        elif index == WARMUP + STEPS:
            self.found = self.look.stop()

    def on_train_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        stay_on_gpu(trainer, module)


def under_trainer(model: str, level: str, look: Kernels | Functions) -> str:
    """Look at steps of the Trainer at a level, whose options follow its name."""
    name, *options = level.split(", ")
    given: dict[str, Any] = dict(option.split("=") for option in options)
    watch = _Watch(look)
    trainer = pl.Trainer(
        accelerator="auto", devices=1, max_steps=WARMUP + STEPS + 1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, callbacks=[watch],
        plugins=LEVELS[chosen(name, LEVELS)](**given),
    )  # fmt: skip
    trainer.fit(_Module(model), [0] * trainer.max_steps)
    return watch.found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model")
    parser.add_argument("contestant", help="with --trainer a level, as msamp_o2, or msamp_o2, head=fp8")
    parser.add_argument("--host", action="store_true", help="Python functions, in the place of kernels")
    parser.add_argument("--trainer", action="store_true", help="under the Lightning Trainer")
    args = parser.parse_args()
    model, look = chosen(args.model, MODELS), Functions() if args.host else Kernels()
    contestant = args.contestant if args.trainer else chosen(args.contestant, CONTESTANTS)
    print(f"{model}, {contestant}")
    print((under_trainer if args.trainer else in_a_loop)(model, contestant, look))


if __name__ == "__main__":
    main()

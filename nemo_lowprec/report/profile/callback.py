"""``StepProfiler``: a Lightning callback that measures where the time of training steps goes."""

from __future__ import annotations

from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch.profiler import ProfilerActivity

from nemo_lowprec.compat.lightning import is_mid_step
from nemo_lowprec.observers import Observer
from nemo_lowprec.plugins import LowPrecision
from nemo_lowprec.report.monitor.about import about_run
from nemo_lowprec.report.monitor.callback import engine_of, folder_of, subject_of
from nemo_lowprec.report.profile.kinds import kind_of
from nemo_lowprec.report.profile.layers import Kernel, layer_ranges, optimizer_range
from nemo_lowprec.report.profile.result import of_cpu, of_gpu, step_profile
from nemo_lowprec.report.profile.step_profile import FILE, StepProfile
from nemo_lowprec.report.profile.tracer import Tracer

__all__ = ["StepProfiler"]


class _Schedule(NamedTuple):
    """Steps before and in each phase: timed without a profiler, traced as they run, traced with ranges of layers.

    The timed steps are in ``windows``, whose median counts: Python's garbage collection or a checkpoint may fall into
    one of them.
    """

    warmup: int
    windows: int
    timed: int  # of a window
    traced: int
    ranged: int = 2  # the first one is not traced: kernels may be compiled in it

    @property
    def first_traced(self) -> int:
        return self.warmup + self.windows * self.timed

    @property
    def all(self) -> int:
        return self.first_traced + self.traced + self.ranged


_ON_GPU = _Schedule(20, 5, 5, 3)  # CUDA graphs come at the 13th step at the latest
_ON_CPU = _Schedule(2, 3, 1, 0)


class _WithoutGraphs(Observer):
    """Has passes run without CUDA graphs: a replayed graph calls no layer."""

    of_all_passes = True


class StepProfiler(pl.Callback):
    """Measures where the time of training steps goes: GEMMs, quantization, attention and so on, layer by layer.

    After 20 steps it times 25 in five windows, traces three as they run, and one without CUDA graphs to learn which
    layer launches which kernel. On a CPU it times three steps after the first two and traces one. A validation between
    steps is left out. Each process of a run needs the callback; the first one measures itself.

    Args:
        path: the file of the profile; None for ``profile.json`` in the folder of ``PrecisionMonitor``.

    Attributes:
        profile: the result, on the first process once the steps are over.
    """

    def __init__(self, path: str | Path | None = None) -> None:
        self._path = path
        self.profile: StepProfile | None = None
        self._tracer: Tracer | None = None
        self._updates: ExitStack | None = None
        self._phases = ExitStack()
        self._is_over = True

    @staticmethod
    def steps() -> int:
        """The optimizer steps that a run needs for a profile."""
        return (_ON_GPU if torch.cuda.is_available() else _ON_CPU).all

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if not isinstance(trainer.precision_plugin, LowPrecision):
            raise ValueError("StepProfiler needs a Trainer with a level of nemo_lowprec among its plugins.")

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._subject = subject_of(trainer)
        self._tracer = Tracer(self._subject.device, trainer.is_global_zero)
        self._schedule = _ON_GPU if self._subject.device.type == "cuda" else _ON_CPU
        self._step, self._is_first = 0, True
        self._raw: list[Kernel] = []
        self._marks: list[float] = []  # times at the edges of windows
        self._is_over, self.profile = False, None
        if trainer.max_steps >= 0 and trainer.max_steps - trainer.global_step < self._schedule.all:
            raise ValueError(
                f"StepProfiler needs {self._schedule.all} steps, and max_steps={trainer.max_steps} leaves "
                f"{trainer.max_steps - trainer.global_step}."
            )

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, i: int) -> None:
        if self._is_over or not self._is_first:
            return
        self._is_first = False
        plan, tracer = self._schedule, self._tracer
        assert tracer is not None
        since = self._step - plan.warmup
        if since >= 0 and since % plan.timed == 0 and len(self._marks) <= plan.windows:
            self._marks.append(tracer.now())
        step = self._step - plan.first_traced
        if step == 0 and plan.traced:
            tracer.start([ProfilerActivity.CUDA])
        if step == plan.traced:
            self._raw = [
                Kernel(event.name, kind_of(event.name), "", event.start, event.end)
                for event in tracer.stop()
                if event.kind == "kernel"
            ]
            self._phases.enter_context(self._subject.observers.watched_by(_WithoutGraphs()))
        if step == plan.traced + 1:
            tracer.start([ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (plan.traced > 0))
            if trainer.is_global_zero:
                self._phases.enter_context(layer_ranges(pl_module))

    def on_before_optimizer_step(self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Any) -> None:
        if self._tracer is not None and self._tracer.is_tracing and self._updates is None:
            self._updates = ExitStack()
            self._updates.enter_context(optimizer_range())

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, i: int
    ) -> None:
        if self._is_over:
            return
        self._end_update()
        if is_mid_step(trainer):
            return
        self._step, self._is_first = self._step + 1, True
        if self._step == self._schedule.all:
            self._finish(trainer, pl_module)

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._tracer is not None:
            self._tracer.pause()

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._tracer is not None:
            self._tracer.resume()

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if not self._is_over:
            rank_zero_warn(f"The training has ended after {self._step} steps. A profile takes {self._schedule.all}.")

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self._end()

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self._end()

    def _end_update(self) -> None:
        if self._updates is not None:
            self._updates.close()
            self._updates = None

    def _finish(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self._is_over = True
        if trainer.is_global_zero:
            assert self._tracer is not None
            events = self._tracer.stop()
            plugin: Any = trainer.precision_plugin
            about = about_run(module, plugin.parsed, self._subject.conversion, engine_of(trainer))
            windows = [end - start for start, end in pairwise(self._marks)]
            seconds = median(windows) / self._schedule.timed
            found = of_gpu(self._raw, events, self._schedule.traced) if self._schedule.traced else of_cpu(events)
            self.profile = step_profile(about, module, self._subject.conversion, seconds, found)
            self.profile.save(Path(self._path or folder_of(trainer) / FILE))
        self._end()

    def _end(self) -> None:
        """Leave the run as it was, at the end or on an error."""
        self._is_over = True
        self._end_update()
        if self._tracer is not None:
            self._tracer.stop()
            self._tracer = None
        self._phases.close()

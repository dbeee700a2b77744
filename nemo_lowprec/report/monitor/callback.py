"""``PrecisionMonitor``: a Lightning callback that watches what low precision does to a model."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor

from nemo_lowprec.compat.lightning import is_mid_step
from nemo_lowprec.models.throughput import data_parallel_size
from nemo_lowprec.plugins import LowPrecision
from nemo_lowprec.report.audit import Audit
from nemo_lowprec.report.monitor.about import about_run
from nemo_lowprec.report.monitor.alarm import Alarm
from nemo_lowprec.report.monitor.logged import LoggedHeatmaps, log_sample
from nemo_lowprec.report.monitor.run_writer import RunWriter
from nemo_lowprec.report.monitor.sample import Sample
from nemo_lowprec.report.monitor.subject import Subject
from nemo_lowprec.report.monitor.watch import Monitor, check_every
from nemo_lowprec.strategies import MegatronStrategy


class PrecisionMonitor(pl.Callback):
    """Samples steps of a run at a level of this package.

    Of a sampled step the monitor notes, for each operand of each layer: amax, scale, underflow, saturation, SQNR and
    dynamic range; for each parameter: the share of elements whose update was lost to rounding, and the errors of
    weights, stored gradients and optimizer states; the error of gradients that are sent in FP8; the gradient norm, the
    loss scale and skipped steps. The second step is sampled, too, and audited (see ``Audit``). The losses of all steps
    are kept.

    Layers that low precision serves badly are warned of once (see ``alarm.py``).

    The numbers go to the Trainer's loggers, with heatmaps of the layers after each validation and at the end where a
    logger takes images (TensorBoard, Weights & Biases); and to the file ``monitor.jsonl`` in the run's folder, which
    ``nemo-lowprec report`` shows. The folder is the one in which the folder of the checkpoints is; without checkpoints
    the first logger's, else the Trainer's ``default_root_dir``.

    Args:
        every_n_steps: distance of the samples, in optimizer steps.
        folder: of the run; None for the folder above.
    """

    def __init__(self, every_n_steps: int = 50, folder: str | Path | None = None) -> None:
        self.every_n_steps, self._folder = check_every(every_n_steps), folder
        self._monitor: Monitor | None = None
        self._writer: RunWriter | None = None
        self._audit = Audit()
        self._heatmaps = LoggedHeatmaps(())
        self._losses: list[Tensor] = []
        self._is_new = True

    @property
    def path(self) -> Path | None:
        """The run's file, on the process that writes it; None before the training starts."""
        return None if self._writer is None else self._writer.path

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        check_level(trainer)
        self._audit.on_fit_start(trainer, pl_module)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        plugin = trainer.precision_plugin
        assert isinstance(plugin, LowPrecision)
        subject = subject_of(trainer)
        self._losses, self._is_new = [], True
        if trainer.is_global_zero:
            self._writer = RunWriter(Path(self._folder or folder_of(trainer)))
            record = about_run(
                pl_module, plugin.parsed, subject.conversion, engine_of(trainer),
                start=trainer.global_step, every_n_steps=self.every_n_steps,
            )  # fmt: skip
            self._writer.write("run", **record)
        self._heatmaps = LoggedHeatmaps(trainer.loggers)
        told: list[Callable[[Sample], None]] = []
        if self._writer is not None:
            told = [partial(log_sample, trainer.loggers), self._heatmaps.add, Alarm(subject, self._writer).look]
        self._monitor = Monitor(subject, self._writer, self.every_n_steps, trainer.global_step, told)

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, i: int) -> None:
        self._audit.on_train_batch_start(trainer, pl_module, batch, i)

    def on_after_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._audit.on_after_backward(trainer, pl_module)

    def on_before_optimizer_step(self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Any) -> None:
        self._audit.on_before_optimizer_step(trainer, pl_module, optimizer)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, i: int
    ) -> None:
        self._audit.on_train_batch_end(trainer, pl_module, outputs, batch, i)
        self._write_audit()
        assert self._monitor is not None
        loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
        if isinstance(loss, Tensor):
            self._losses.append(loss.detach())
        tokens = getattr(getattr(pl_module, "token_rate", None), "tokens", None)
        self._monitor.tokens = None if tokens is None else tokens * data_parallel_size(trainer)
        if self._losses and not is_mid_step(trainer):
            losses = torch.stack([loss.float().reshape(()) for loss in self._losses])
            # Lightning divides the losses by their number. A pipeline's last one stands for all.
            self._monitor.add_loss(losses[-1] * len(losses) if self._is_pipelined(trainer) else losses.sum())
            self._losses = []

    @staticmethod
    def _is_pipelined(trainer: pl.Trainer) -> bool:
        return isinstance(trainer.strategy, MegatronStrategy) and trainer.strategy.engine.is_pipelined

    def _write_audit(self) -> None:
        report = self._audit.report
        if report is None or not self._is_new:
            return
        self._is_new = False
        if self._writer is not None:
            self._writer.write("audit", **report.record())

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._monitor is not None:
            self._monitor.pause()

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._monitor is not None:
            self._monitor.resume()
            found = trainer.callback_metrics.items()
            self._monitor.validated({name: float(value) for name, value in found if name.startswith("val")})
            self._heatmaps.log(trainer.global_step)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._end(finished=not trainer.interrupted)
        self._heatmaps.log(trainer.global_step)

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self._audit.on_exception(trainer, pl_module, exception)
        self._end(finished=False)

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self._audit.teardown(trainer, pl_module, stage)
        self._end(finished=False)

    def _end(self, finished: bool) -> None:
        monitor, self._monitor = self._monitor, None
        if monitor is not None:
            monitor.close(finished)
            if self._writer is not None:
                self._writer.close()


def check_level(trainer: pl.Trainer) -> None:
    """Check that ``trainer`` has a level to watch.

    Raises:
        ValueError: the precision of the Trainer is Lightning's own.
    """
    if not isinstance(trainer.precision_plugin, LowPrecision):
        raise ValueError("PrecisionMonitor needs a Trainer with a level of nemo_lowprec among its plugins.")


def folder_of(trainer: pl.Trainer) -> Path:
    """The folder of a run; see ``PrecisionMonitor``."""
    for callback in trainer.checkpoint_callbacks:
        if isinstance(callback, ModelCheckpoint) and callback.dirpath is not None:
            return Path(callback.dirpath).parent
    return Path(trainer.log_dir or trainer.default_root_dir)


def subject_of(trainer: pl.Trainer) -> Subject:
    """The model at work under ``trainer``."""
    if isinstance(trainer.strategy, MegatronStrategy):
        from nemo_lowprec.report.monitor.megatron_subject import MegatronSubject

        return MegatronSubject(trainer.strategy.engine)
    plugin: Any = trainer.precision_plugin
    return Subject(plugin.engine)


def engine_of(trainer: pl.Trainer) -> str:
    """How the processes of a run share the model: ``single``, ``ddp``, ``fsdp2`` or ``megatron``."""
    if isinstance(trainer.strategy, MegatronStrategy):
        return "megatron"
    plugin: Any = trainer.precision_plugin
    if plugin.engine.columns.weights.is_sharded:
        return "fsdp2"
    return "ddp" if trainer.world_size > 1 else "single"

"""Declared beside observed: look into one real training step and report the formats found in every column.

``Audit`` is a callback. It watches the second optimizer step (the first one allocates), and looks

* at the GEMM operands as the layers announce them, in forward and backward,
* at the gradients right after backward, before they are unscaled or clipped,
* at weights, masters and optimizer states after the step,
* at the messages to other processes in all of this.

A sharded model and one on Megatron-core are looked at elsewhere: see ``engine_look`` and ``megatron_look``.
"""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl

from nemo_lowprec.plugins import LowPrecision
from nemo_lowprec.report.engine_look import EngineLook, ShardedLook
from nemo_lowprec.report.findings import AuditReport, Finding
from nemo_lowprec.report.look import Look
from nemo_lowprec.report.megatron_look import MegatronLook
from nemo_lowprec.strategies import MegatronStrategy

__all__ = ["Audit", "AuditReport", "Finding"]


class Audit(pl.Callback):
    """Watches one step of a run at a level of this package; ``report`` holds the result afterwards."""

    STEP = 1

    def __init__(self) -> None:
        self.report: AuditReport | None = None
        self._look: Look | None = None

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if not isinstance(trainer.precision_plugin, LowPrecision):
            raise ValueError("Audit needs a Trainer with a level of nemo_lowprec among its plugins.")
        self.report = None

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, i: int) -> None:
        if self.report is None and self._look is None and trainer.global_step == self.STEP:
            self._look = _look_at(trainer, pl_module)

    def on_after_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._look is not None:
            self._look.after_backward()

    def on_before_optimizer_step(self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Any) -> None:
        if self._look is not None:
            self._look.before_step()

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, i: int
    ) -> None:
        if self._look is not None and trainer.global_step > self.STEP:
            self.report = self._look.report()
            self._look = None

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self._end()

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self._end()

    def _end(self) -> None:
        """Leave a step that was not looked at until its end, for an error or because the run was over."""
        if self._look is not None:
            self._look.end()
            self._look = None


def _look_at(trainer: pl.Trainer, module: pl.LightningModule) -> Look:
    plugin = trainer.precision_plugin
    assert isinstance(plugin, LowPrecision)
    engine = plugin.engine
    if isinstance(trainer.strategy, MegatronStrategy):
        return MegatronLook(trainer.strategy.engine, module)
    return (ShardedLook if engine.columns.weights.is_sharded else EngineLook)(engine, trainer, module)

"""Checkpoints that are written between two micro-batches of a step: they hold the step's gradients, or are refused.

Validation in the middle of a step (``val_check_interval`` that ``accumulate_grad_batches`` does not divide), a signal
or ``trainer.save_checkpoint`` write such a checkpoint. Without the gradients so far, the resumed run would step on the
gradients of the remaining micro-batches alone.
"""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor

from nemo_lowprec.checkpoint.partial_gradients import KEY, restore_gradients, saved_gradients
from nemo_lowprec.engine import Engine

__all__ = ["PartialGradients", "check_saves"]


class PartialGradients:
    """Saves the gradients of an unfinished step, and sets them before the first step of the resumed run.

    Gradients in Megatron-core's buffers are not saved: a warning says so.

    Attributes:
        pending: whether a backward pass has run since the last step.
        running: whether a backward pass or a step has begun and not ended, as an error may leave it.
    """

    def __init__(self) -> None:
        self.pending = self.running = False
        self._saved: dict[str, Any] | None = None
        self._warned = False

    def state_dict(
        self, engine: Engine, module: pl.LightningModule | None, new: set[int] | None = None
    ) -> dict[str, Any]:
        """Gradients as plain values or shards; {} between two steps. Called on all processes.

        Args:
            new: ids of parameters whose gradients no step has used; None for all with a gradient, if ``pending``.
        """
        if module is None or module._trainer is None or module.trainer.state.fn != "fit":
            return {}
        if engine.model is not None and not self.running:
            return saved_gradients(engine, module, new if new is not None or self.pending else set())
        # With Megatron-core's strategy, which calls no hooks of the plugin, only the loop knows.
        unfinished = self.running or module.trainer.fit_loop.epoch_loop._should_accumulate()
        if unfinished and not self._warned:
            self._warned = True
            _warn("saved")
        return {KEY: {}} if unfinished else {}

    def load_state_dict(self, state: dict[str, Any], module: pl.LightningModule | None) -> None:
        """Keep the saved gradients for the first step."""
        if module is not None and module.trainer.state.fn == "fit":
            self._saved = state.get(KEY)

    def before_first_step(self, engine: Engine, module: pl.LightningModule | None) -> list[Tensor]:
        """Called before every training step. Returns the parameters that have got a gradient."""
        if self._saved is None or module is None:
            return []
        saved, self._saved = self._saved, None
        if not saved or engine.model is None:
            _warn("resumed")
            return []
        self.pending = True
        return restore_gradients(saved, engine, module)

    def forget(self) -> None:
        """The run is over."""
        self.pending, self.running, self._saved = False, False, None


def _warn(when: str) -> None:
    rank_zero_warn(
        f"This checkpoint is {when} between two micro-batches of a step, whose gradients so far it does not hold: the "
        "resumed run makes that step with the rest of its micro-batches alone. Save at the end of steps "
        "(ModelCheckpoint's every_n_train_steps, a val_check_interval that accumulate_grad_batches divides), or use "
        "lowprec_ddp or lowprec_sharded, whose checkpoints hold them."
    )


def check_saves(trainer: pl.Trainer) -> None:
    """Refuse a ``ModelCheckpoint`` between two micro-batches, for a strategy that does not save these gradients.

    Called when the training starts.

    Raises:
        ValueError: a ``ModelCheckpoint`` would save between two micro-batches of a step.
    """
    in_step = trainer.accumulate_grad_batches
    every: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
    savers = [callback for callback in every if isinstance(callback, ModelCheckpoint)]
    if in_step == 1 or not savers:
        return
    lost = f"between two micro-batches of a step (accumulate_grad_batches={in_step}), whose gradients it would not hold"
    if any(saver._train_time_interval is not None for saver in savers):
        raise ValueError(f"ModelCheckpoint(train_time_interval=...) may save {lost}. Use every_n_train_steps.")
    if not trainer.enable_validation:
        return
    seconds = vars(trainer).get("_val_check_time_interval")
    if seconds is not None:
        raise ValueError(
            f"A val_check_interval of {seconds:.0f} s may validate, and ModelCheckpoint save, "
            f"{lost}. Use a number of batches, a multiple of {in_step}."
        )
    batches, between = trainer.num_training_batches, trainer.val_check_batch
    through = trainer.check_val_every_n_epoch is None  # batches are counted through the epochs, whose last steps may
    shorter = through and batches != float("inf") and batches % in_step  # have fewer of them
    if between is None or between == float("inf") or (between == batches and not through):
        return
    if between % in_step or shorter:
        reason = f", and an epoch of {batches} batches ends with a shorter step" if shorter else ""
        raise ValueError(
            f"Validation after every {between:.0f} batches{reason}: ModelCheckpoint would save {lost}. Set "
            f"val_check_interval to a multiple of {in_step}, with epochs of whole steps."
        )

"""Refuses checkpoints between two micro-batches, for a strategy that does not save an unfinished step's gradients."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ModelCheckpoint

__all__ = ["check_saves"]


def check_saves(trainer: pl.Trainer) -> None:
    """Called when the training starts.

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

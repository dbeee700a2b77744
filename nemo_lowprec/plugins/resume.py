"""Bit-for-bit resume: saves random states, and the gradients of a step whose micro-batches have not all run.

Validation in the middle of a step (``val_check_interval`` that ``accumulate_grad_batches`` does not divide), a signal
or ``trainer.save_checkpoint`` write a checkpoint between two micro-batches. Without the gradients so far, the resumed
run would step on the gradients of the remaining micro-batches alone.
"""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities.rank_zero import WarningCache, rank_zero_warn
from torch import Tensor

from nemo_lowprec.checkpoint.partial_gradients import KEY, restore_gradients, saved_gradients
from nemo_lowprec.checkpoint.random_states import random_states, set_random_states
from nemo_lowprec.comm import by_rank
from nemo_lowprec.compat import lightning as compat
from nemo_lowprec.engine import Engine

_NO_PLACE = (
    "This checkpoint is {} in mid-epoch, and the training data loader does not carry its position: the resumed run "
    "starts the epoch's data over. Use a loader with state_dict() and load_state_dict() (nemo_lowprec.data has one) or "
    "save at the end of epochs."
)
_NO_GRADIENTS = (
    "This checkpoint is {} between two micro-batches of a step, whose gradients so far it does not hold: the resumed "
    "run makes that step with the rest of its micro-batches alone. Save at the end of steps (ModelCheckpoint's "
    "every_n_train_steps, a val_check_interval that accumulate_grad_batches divides), or use lowprec_ddp or "
    "lowprec_sharded, whose checkpoints hold them."
)


class ResumeState:
    """Saves random states and an unfinished step's gradients, and sets them again in the resumed run.

    Gradients in Megatron-core's buffers are not saved: a warning says so.

    Attributes:
        pending: whether a backward pass has run since the last step.
        running: whether a backward pass or a step has begun and not ended; stays True after an error in it.
    """

    def __init__(self) -> None:
        self.pending = self.running = False
        self._rng: dict[str, Any] | None = None
        self._gradients: dict[str, Any] | None = None
        self._said = WarningCache()

    def state_dict(
        self, engine: Engine, module: pl.LightningModule | None, new: set[int] | None = None
    ) -> dict[str, Any]:
        """The random states of all processes, and the gradients of an unfinished step; a collective.

        ``new`` has the ids of the parameters whose gradients no step has used; None: all, if ``pending``.
        """
        if module is None or compat.trainer_of(module) is None:
            return {}
        in_mid_epoch = _in_mid_epoch(module.trainer)
        if in_mid_epoch and not _loader_is_stateful(module.trainer):
            self._said.warn(_NO_PLACE.format("saved"))
        state = {"rng": by_rank(random_states()), "mid_epoch": in_mid_epoch}
        if module.trainer.state.fn != "fit":
            return state
        if engine.model is not None and not self.running:
            return state | saved_gradients(engine, new if new is not None or self.pending else set())
        # MegatronStrategy calls no hooks of the plugin: Lightning's loop knows whether a step is unfinished.
        if not self.running and not compat.is_mid_step(module.trainer):
            return state
        self._said.warn(_NO_GRADIENTS.format("saved"))
        return state | {KEY: {}}

    def load_state_dict(self, state: dict[str, Any], module: pl.LightningModule | None) -> None:
        """Set the random states; keep the gradients, and the random states of a continued epoch, for its first step."""
        if module is None or module.trainer.state.fn != "fit":
            return
        self._gradients = state.get(KEY)
        rank = module.trainer.global_rank
        if rank < len(state.get("rng", ())):  # a process that the interrupted run did not have keeps its own states
            mine = state["rng"][rank]
            self._rng = mine if state["mid_epoch"] else None
            set_random_states(mine)

    def before_first_step(self, engine: Engine, module: pl.LightningModule | None) -> list[Tensor]:
        """Restore gradients and random states before the first training step after a resume.

        Returns:
            the parameters that have got a gradient.
        """
        if module is None:
            return []
        (rng, self._rng), (gradients, self._gradients) = (self._rng, None), (self._gradients, None)
        if rng is not None:
            # Making the loader's iterator has drawn from torch's generator since ``load_state_dict``.
            set_random_states(rng)
            if not _loader_is_stateful(module.trainer):
                rank_zero_warn(_NO_PLACE.format("resumed"))
        if gradients and engine.model is not None:
            self.pending = True
            return restore_gradients(gradients, engine)
        if gradients is not None:
            rank_zero_warn(_NO_GRADIENTS.format("resumed"))
        return []

    def forget(self) -> None:
        """Drop the state of the run."""
        self.pending, self.running, self._gradients = False, False, None


def _in_mid_epoch(trainer: pl.Trainer) -> bool:
    loop = trainer.fit_loop
    if trainer.state.fn != "fit" or compat.train_data(trainer) is None:
        return False
    return not loop.epoch_loop.batch_progress.is_last_batch and loop.epoch_loop.batch_progress.current.ready > 0


def _loader_is_stateful(trainer: pl.Trainer) -> bool:
    loaders = compat.train_loaders(trainer)
    return all(hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict") for loader in loaders)


def check_saves(trainer: pl.Trainer) -> None:
    """Raise ValueError where a ``ModelCheckpoint`` would save between two micro-batches of a step.

    Called when the training starts, for a strategy that does not save the gradients of such a step.
    """
    in_step = trainer.accumulate_grad_batches
    every: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
    savers = [callback for callback in every if isinstance(callback, ModelCheckpoint)]
    if in_step == 1 or not savers:
        return
    lost = f"between two micro-batches of a step (accumulate_grad_batches={in_step}), whose gradients it would not hold"
    if any(compat.saves_by_time(saver) for saver in savers):
        raise ValueError(f"ModelCheckpoint(train_time_interval=...) may save {lost}. Use every_n_train_steps.")
    if not trainer.enable_validation:
        return
    seconds = compat.seconds_between_validations(trainer)
    if seconds is not None:
        raise ValueError(
            f"A val_check_interval of {seconds:.0f} s may validate, and ModelCheckpoint save, "
            f"{lost}. Use a number of batches, a multiple of {in_step}."
        )
    batches, between = trainer.num_training_batches, trainer.val_check_batch
    # Without check_val_every_n_epoch batches are counted over all epochs, and an epoch may end with a shorter step.
    through = trainer.check_val_every_n_epoch is None
    shorter = through and batches != float("inf") and batches % in_step
    if between is None or between == float("inf") or (between == batches and not through):
        return
    if between % in_step or shorter:
        reason = f", and an epoch of {batches} batches ends with a shorter step" if shorter else ""
        raise ValueError(
            f"Validation after every {between:.0f} batches{reason}: ModelCheckpoint would save {lost}. Set "
            f"val_check_interval to a multiple of {in_step}, with epochs of whole steps."
        )

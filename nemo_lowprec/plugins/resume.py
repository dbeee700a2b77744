"""Bit-for-bit resume: random states in a checkpoint, and a warning for a data loader that does not know its place."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from nemo_lowprec.checkpoint.by_rank import by_rank
from nemo_lowprec.checkpoint.random_states import random_states, set_random_states

__all__ = ["ResumeState"]


class ResumeState:
    """Saves the random states of all processes, and sets them again in the resumed run."""

    def __init__(self) -> None:
        self._pending: dict[str, Any] | None = None
        self._warned = False

    def state_dict(self, module: pl.LightningModule | None) -> dict[str, Any]:
        """Random states as plain values, by rank. Called on all processes, as Lightning dumps a checkpoint on each.

        Warns where the data loader will not continue in mid-epoch.
        """
        if module is None or module._trainer is None:
            return {}
        in_mid_epoch = _in_mid_epoch(module.trainer)
        if in_mid_epoch and not self._warned and not _loader_is_stateful(module.trainer):
            self._warned = True
            _warn("saved")
        return {"rng": by_rank(random_states()), "mid_epoch": in_mid_epoch}

    def load_state_dict(self, state: dict[str, Any], module: pl.LightningModule | None) -> None:
        """Set the random states, now and once more before the first batch of a continued epoch."""
        if "rng" not in state or module is None or module.trainer.state.fn != "fit":
            return
        rank = module.trainer.global_rank
        if rank < len(state["rng"]):  # a process that the interrupted run did not have keeps its own states
            mine = state["rng"][rank]
            self._pending = mine if state["mid_epoch"] else None
            set_random_states(mine)

    def before_first_step(self, module: pl.LightningModule | None) -> None:
        """Called before every training step."""
        if self._pending is None or module is None:
            return
        state, self._pending = self._pending, None
        # Making the loader's iterator draws from torch's generator; the interrupted run had done so long before.
        set_random_states(state)
        if not _loader_is_stateful(module.trainer):
            _warn("resumed")


def _in_mid_epoch(trainer: pl.Trainer) -> bool:
    loop = trainer.fit_loop
    if trainer.state.fn != "fit" or loop._data_source.instance is None:
        return False
    return not loop.epoch_loop.batch_progress.is_last_batch and loop.epoch_loop.batch_progress.current.ready > 0


def _loader_is_stateful(trainer: pl.Trainer) -> bool:
    combined = trainer.fit_loop._combined_loader
    loaders = [] if combined is None else combined.flattened
    return all(hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict") for loader in loaders)


def _warn(when: str) -> None:
    rank_zero_warn(
        f"This checkpoint is {when} in mid-epoch, and the training data loader does not carry its position: the "
        "resumed run starts the epoch's data over. Use a loader with state_dict() and load_state_dict() "
        "(nemo_lowprec.data has one) or save at the end of epochs."
    )

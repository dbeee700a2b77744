"""What bit-for-bit resume needs beside weights and scales: random states, and a data loader that knows its place."""

from __future__ import annotations

import random
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
import torch.distributed as dist
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

__all__ = ["ResumeState"]


class ResumeState:
    """Random states in a checkpoint, put back where the interrupted run stood."""

    def __init__(self) -> None:
        self._pending: dict[str, Any] | None = None
        self._warned = False

    def state_dict(self, module: pl.LightningModule | None) -> dict[str, Any]:
        """Random states as plain values; warns where the data loader will not continue in mid-epoch."""
        if module is None or module._trainer is None:
            return {}
        in_mid_epoch = _in_mid_epoch(module.trainer)
        if in_mid_epoch and not self._warned and not _loader_is_stateful(module.trainer):
            self._warned = True
            _warn("saved")
        return {"rng": _of_all_processes(_rng_states()), "mid_epoch": in_mid_epoch}

    def load_state_dict(self, state: dict[str, Any], module: pl.LightningModule | None) -> None:
        """Put the random states back, now and once more before the first batch of a continued epoch."""
        if "rng" not in state or module is None or module.trainer.state.fn != "fit":
            return
        rank = module.trainer.global_rank
        if rank < len(state["rng"]):  # a process that the interrupted run did not have keeps its own states
            mine = state["rng"][rank]
            self._pending = mine if state["mid_epoch"] else None
            _set_rng_states(mine)

    def before_first_step(self, module: pl.LightningModule | None) -> None:
        """Called before every training step."""
        if self._pending is None or module is None:
            return
        state, self._pending = self._pending, None
        # Making the loader's iterator draws from torch's generator; the interrupted run had done that long before.
        _set_rng_states(state)
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


def _of_all_processes(states: dict[str, Any]) -> list[dict[str, Any]]:
    """By rank; Lightning dumps a checkpoint on every process."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return [states]
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, states)
    return gathered


def _rng_states() -> dict[str, Any]:
    # Plain values and tensors, so that the file opens with weights_only=True.
    version, internal, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    states: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "python": [version, list(internal), gauss],
        "numpy": [str(name), torch.from_numpy(np.asarray(keys).astype(np.int64)), int(position), int(has_gauss),
                  float(cached)],
    }  # fmt: skip
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def _set_rng_states(states: dict[str, Any]) -> None:
    torch.set_rng_state(states["torch"].cpu())
    version, internal, gauss = states["python"]
    random.setstate((version, tuple(internal), gauss))
    name, keys, position, has_gauss, cached = states["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), position, has_gauss, cached))
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"].cpu())

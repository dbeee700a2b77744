"""The gradients of a step whose micro-batches have not all run, in a checkpoint that is written between two of them.

Validation in the middle of a step (``val_check_interval`` that ``accumulate_grad_batches`` does not divide), a signal
or ``trainer.save_checkpoint`` write such a checkpoint. Without these gradients, the resumed run would step on those of
the micro-batches that are left.
"""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor

from nemo_lowprec.engine import Engine
from nemo_lowprec.formats import GradientTensor, StoredTensor

__all__ = ["PartialGradients"]

_KEY = "partial_gradients"


class PartialGradients:
    """Saves the gradients of an unfinished step, and puts them back before the first step of the resumed run.

    One process saves the bits that it has. Several save the mean of theirs, in FP32: that each of them starts from
    it again has the same mean at the step's end, up to the rounding of sums, on any number of processes. Sharded
    gradients, and those in Megatron-core's buffers, are not saved, which is said.

    Attributes:
        pending: whether a backward pass has run since the last step.
        running: whether a backward pass or a step has begun and not ended, as where an error has stopped it.
    """

    def __init__(self) -> None:
        self.pending = self.running = False
        self._saved: dict[str, Any] | None = None
        self._warned = False

    @torch.no_grad()
    def state_dict(self, engine: Engine, module: pl.LightningModule | None) -> dict[str, Any]:
        """Plain values; nothing between two steps. Called on all processes."""
        if module is None or module._trainer is None or module.trainer.state.fn != "fit":
            return {}
        if self.running or not _is_saved(engine):
            # Megatron-core's strategy runs without the plugin's hooks.
            loop = module.trainer.fit_loop.epoch_loop
            unfinished = self.pending if engine.model is not None else loop._should_accumulate()
            unfinished = unfinished or self.running
            if unfinished and not self._warned:
                self._warned = True
                _warn("saved")
            return {_KEY: {}} if unfinished else {}
        if not self.pending:
            return {}
        grads = {name: p.grad for name, p in module.named_parameters() if p.grad is not None}
        scale = engine.loss_scale.used if engine.loss_scale is not None else 1.0
        if module.trainer.world_size > 1:
            if engine.histories is not None:
                engine.histories.nonfinite()  # this step's amaxes become everybody's, as at its end
            return {_KEY: {"scale": scale, "grads": _mean(grads, module)}}
        return {_KEY: {"scale": scale, "grads": {name: _plain(grad) for name, grad in grads.items()}}}

    def load_state_dict(self, state: dict[str, Any], module: pl.LightningModule | None) -> None:
        """Keep what was saved for the first step."""
        if module is not None and module.trainer.state.fn == "fit":
            self._saved = state.get(_KEY)

    @torch.no_grad()
    def before_first_step(self, engine: Engine, module: pl.LightningModule | None) -> None:
        """Called before every training step."""
        if self._saved is None or module is None:
            return
        saved, self._saved = self._saved, None
        if not saved or not _is_saved(engine):
            _warn("resumed")
            return
        factor = (engine.loss_scale.used if engine.loss_scale is not None else 1.0) / saved["scale"]
        for name, param in module.named_parameters():
            if name in saved["grads"] and param.requires_grad:
                param.grad = _as_stored(saved["grads"][name], param, factor, engine)
        self.pending = True

    def forget(self) -> None:
        """The run is over."""
        self.pending, self.running, self._saved = False, False, None


def _is_saved(engine: Engine) -> bool:
    return engine.model is not None and engine.sharding is None


def _plain(grad: Tensor) -> Any:
    if isinstance(grad, GradientTensor):
        parts = [part.cpu().clone() for part in grad.parts()]
        return {"parts": parts, "multiplied": grad.multiplied, "additions": grad.additions}
    return grad.detach().cpu().clone()


def _values(grad: Tensor) -> Tensor:
    values = grad.dequantize() if isinstance(grad, StoredTensor) else grad.detach()
    return (values.to_dense() if values.is_sparse else values).float()


def _mean(grads: dict[str, Tensor], module: pl.LightningModule) -> dict[str, Tensor]:
    """By name, on the first process: means over the processes, of which not all need have the same gradients."""
    names: list[list[str]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(names, list(grads))
    found, params = {}, dict(module.named_parameters())
    for name in dict.fromkeys(name for theirs in names for name in theirs):
        mine = grads.get(name)
        total = torch.zeros(params[name].shape, device=params[name].device) if mine is None else _values(mine).clone()
        total /= dist.get_world_size()
        dist.reduce(total, 0)
        if dist.get_rank() == 0:
            found[name] = total.cpu()
    return found


def _as_stored(saved: Any, param: Tensor, factor: float, engine: Engine) -> Tensor:
    """A gradient in the format that this level stores it in: the very bits where they were saved in that one."""
    in_fp8 = engine.stored is not None and engine.stored.is_matrix(param)
    if isinstance(saved, dict):
        grad = GradientTensor(*(part.to(param.device) for part in saved["parts"]))
        grad.multiplied, grad.additions = saved["multiplied"], saved["additions"]
        if not in_fp8 or factor != 1:
            saved = grad.dequantize()
    if not isinstance(saved, dict):
        values = saved.to(param.device)
        values = values * factor if factor != 1 else values
        if not in_fp8:
            return values.to(param.grad_dtype or torch.float32)
        grad = GradientTensor.from_float(values)
    if engine.gradients is not None:
        grad.overflowed = engine.gradients.overflowed
    return grad


def _warn(when: str) -> None:
    rank_zero_warn(
        f"This checkpoint is {when} between two micro-batches of a step, whose gradients so far it does not hold: the "
        "resumed run makes that step with the rest of its micro-batches alone. Save at the end of steps "
        "(ModelCheckpoint's every_n_train_steps, a val_check_interval that accumulate_grad_batches divides), or use "
        "lowprec_ddp, whose checkpoints hold them."
    )

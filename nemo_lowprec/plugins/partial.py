"""The gradients of a step whose micro-batches have not all run, in a checkpoint that is written between two of them.

Validation in the middle of a step (``val_check_interval`` that ``accumulate_grad_batches`` does not divide), a signal
or ``trainer.save_checkpoint`` write such a checkpoint. Without these gradients, the resumed run would step on those of
the micro-batches that are left.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor

from nemo_lowprec.engine import Engine
from nemo_lowprec.tensors import GradientTensor, QuantizedTensor
from nemo_lowprec.tensors.dtensor import as_dtensor_like, is_sharded, local_rows, local_shard

__all__ = ["PartialGradients", "partial_gradients"]

_KEY = "partial_gradients"


class PartialGradients:
    """Saves the gradients of an unfinished step, and puts them back before the first step of the resumed run.

    One process saves the bits that it has. Several save the mean of theirs, in FP32: that each of them starts from
    it again has the same mean at the step's end, up to the rounding of sums, on any number of processes. Of sharded
    parameters each process saves its rows of the mean, and goes on from them. Gradients in Megatron-core's buffers are
    not saved, which is said.

    Attributes:
        pending: whether a backward pass has run since the last step.
        running: whether a backward pass or a step has begun and not ended, as where an error has stopped it.
    """

    def __init__(self) -> None:
        self.pending = self.running = False
        self._saved: dict[str, Any] | None = None
        self._warned = False

    @torch.no_grad()
    def state_dict(
        self, engine: Engine, module: pl.LightningModule | None, new: set[int] | None = None
    ) -> dict[str, Any]:
        """Plain values, and shards; nothing between two steps. Called on all processes.

        Args:
            new: ids of parameters whose gradients no step has used; None for all that have one, if ``pending``.
        """
        if module is None or module._trainer is None or module.trainer.state.fn != "fit":
            return {}
        pending = self.pending if new is None else bool(new)
        if self.running or engine.model is None:
            # Megatron-core's strategy runs without the plugin's hooks.
            loop = module.trainer.fit_loop.epoch_loop
            unfinished = pending if engine.model is not None else loop._should_accumulate()
            unfinished = unfinished or self.running
            if unfinished and not self._warned:
                self._warned = True
                _warn("saved")
            return {_KEY: {}} if unfinished else {}
        params, waiting = _parameters(engine, module), engine.columns.weights.unreduced()
        mine = {
            name: param for name, param in params.items()
            if pending and (new is None or id(param) in new) and (param.grad is not None or id(param) in waiting)
        }  # fmt: skip
        grads: dict[str, Any] = {}
        if module.trainer.world_size == 1 and not engine.columns.weights.is_sharded:
            grads = {name: _plain(param.grad) for name, param in mine.items()}
        elif names := _of_all(mine):
            engine.amaxes.equalize()
            for name in names:
                mean = _mean(params[name], name in mine, waiting)
                if mean is not None:
                    grads[name] = mean
        scale = engine.step.loss_scale.used if engine.step.loss_scale is not None else 1.0
        return {_KEY: {"scale": scale, "grads": grads}} if grads else {}

    def load_state_dict(self, state: dict[str, Any], module: pl.LightningModule | None) -> None:
        """Keep what was saved for the first step."""
        if module is not None and module.trainer.state.fn == "fit":
            self._saved = state.get(_KEY)

    @torch.no_grad()
    def before_first_step(self, engine: Engine, module: pl.LightningModule | None) -> list[Tensor]:
        """Called before every training step. Returns the parameters that were given a gradient."""
        if self._saved is None or module is None:
            return []
        saved, self._saved = self._saved, None
        if not saved or engine.model is None:
            _warn("resumed")
            return []
        factor = (engine.step.loss_scale.used if engine.step.loss_scale is not None else 1.0) / saved["scale"]
        params = _parameters(engine, module)
        found = {name: p for name, p in params.items() if name in saved["grads"] and p.requires_grad}
        for name, param in found.items():
            param.grad = _as_stored(saved["grads"][name], param, factor, engine)
        self.pending = True
        return list(found.values())

    def forget(self) -> None:
        """The run is over."""
        self.pending, self.running, self._saved = False, False, None


def partial_gradients(checkpoint: dict[str, Any]) -> dict[str, Any]:
    """Gradients by parameter name, the dict itself that ``checkpoint`` holds in the plugin's state; {} for none."""
    states = (value for value in checkpoint.values() if isinstance(value, dict))
    return next((state[_KEY].get("grads", {}) for state in states if _KEY in state), {})


def _parameters(engine: Engine, module: pl.LightningModule) -> dict[str, Any]:
    return engine.columns.weights.named()


def _plain(grad: Tensor) -> Any:
    if isinstance(grad, GradientTensor):
        parts = [part.cpu().clone() for part in grad.parts()]
        return {"parts": parts, "multiplied": grad.multiplied, "additions": grad.additions}
    return grad.detach().cpu().clone()


def _values(grad: Tensor) -> Tensor:
    values = grad.dequantize() if isinstance(grad, QuantizedTensor) else grad.detach()
    return (values.to_dense() if values.is_sparse else values).float()


def _of_all(names: Iterable[str]) -> list[str]:
    """The names that any process has, in the same order on all."""
    found: list[list[str]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(found, list(names))
    return list(dict.fromkeys(name for theirs in found for name in theirs))


def _mean(param: Any, is_mine: bool, waiting: dict[int, Tensor]) -> Tensor | None:
    """Of a parameter's gradients over the processes, in FP32: on the first process, or cut as ``param`` is.

    Args:
        is_mine: whether this process has one; not all need.
        waiting: of sharded parameters, what is to be added to the gradients that were reduced onto shards.
    """
    mine = waiting.get(id(param)) if is_sharded(param) else param.grad
    total = torch.zeros(param.shape, device=param.device) if mine is None or not is_mine else _values(mine).clone()
    total /= dist.get_world_size()
    if not is_sharded(param):
        dist.reduce(total, 0)
        return total.cpu() if dist.get_rank() == 0 else None
    dist.all_reduce(total)
    rows = local_rows(total, param).clone()
    if is_mine and param.grad is not None:
        rows += _values(local_shard(param.grad))
    return as_dtensor_like(rows, param)


def _as_stored(saved: Any, param: Tensor, factor: float, engine: Engine) -> Tensor:
    """A gradient in the format that this level stores it in: the very bits where they were saved in that one."""
    weights = engine.columns.weights
    in_fp8 = weights.is_matrix(param)
    if isinstance(saved, dict):
        grad = GradientTensor(*(part.to(param.device) for part in saved["parts"]))
        grad.multiplied, grad.additions = saved["multiplied"], saved["additions"]
        if not in_fp8 or factor != 1 or weights.is_sharded:
            saved = grad.dequantize()
    if not isinstance(saved, dict):
        values = local_rows(saved, param).to(param.device)
        values = values * factor if factor != 1 else values
        if not in_fp8:
            return as_dtensor_like(values.to(param.grad_dtype or torch.float32), param)
        grad = GradientTensor.from_float(values)
    return as_dtensor_like(grad, param)


def _warn(when: str) -> None:
    rank_zero_warn(
        f"This checkpoint is {when} between two micro-batches of a step, whose gradients so far it does not hold: the "
        "resumed run makes that step with the rest of its micro-batches alone. Save at the end of steps "
        "(ModelCheckpoint's every_n_train_steps, a val_check_interval that accumulate_grad_batches divides), or use "
        "lowprec_ddp or lowprec_sharded, whose checkpoints hold them."
    )

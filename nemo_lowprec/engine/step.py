"""Runs optimizer steps for every loop: loss scale, unscale, clip, skip, refresh of weights, amax histories."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor
from torch.optim import Optimizer

from nemo_lowprec.engine.columns import Columns
from nemo_lowprec.grads import FoundInf, LossScale, TrueGradients
from nemo_lowprec.observers import Observers
from nemo_lowprec.optim import handles_found_inf


class Step:
    """The steps of one model's optimizers.

    Attributes:
        columns: the columns of the row, for this model.
        loss_scale: the level's; None for a level without loss scaling.
        device: the model's.
        unit: the factor in the gradients whose amaxes are in the histories; None where the factor is unknown.
        skipped: the optimizers whose last step was skipped because a gradient was not finite.
    """

    def __init__(self, columns: Columns, loss_scale: LossScale | None, observers: Observers) -> None:
        self.columns, self.loss_scale, self.observers = columns, loss_scale, observers
        self.device = torch.device("cpu")
        self.unit: float | None = 1.0 if loss_scale is None else loss_scale.used
        self.skipped: WeakSet[Optimizer] = WeakSet()
        self._gradients = TrueGradients(loss_scale)
        self._found: WeakKeyDictionary[Optimizer, FoundInf] = WeakKeyDictionary()
        self._saturated: Tensor | None = None

    def scale(self, loss: Tensor) -> Tensor:
        """The scaled loss; announces the backward pass, see ``begin``."""
        return loss * scale if (scale := self.begin()) != 1 else loss

    def begin(self, micro_batches: int = 1) -> float:
        """Announce a backward pass, of losses that are divided by ``micro_batches``. Returns the loss scale."""
        for column in self.columns:
            column.before_backward()
        self._found.clear()
        self._gradients.begin()
        scale = 1.0 if self.loss_scale is None else self.loss_scale.begin()
        self.expect(scale / micro_batches)
        return scale

    def expect(self, unit: float) -> None:
        """Adapt the scales of FP8 operands to gradients that are multiplied by ``unit``."""
        before, self.unit = self.unit, unit
        if before is not None and before != unit:
            for amaxes in self.columns.amaxes:
                amaxes.expect(unit / before)

    def unscale(self, optimizer: Optimizer) -> None:
        """Make the optimizer's gradients true gradients, once a backward pass."""
        if optimizer not in self._found:
            self._gradients.unscale(optimizer, self.device)

    def clip(self, optimizer: Optimizer, max_norm: float) -> None:
        """Scale the optimizer's true gradients down to ``max_norm``; a norm that is not finite skips the step."""
        self.unscale(optimizer)
        found = self._gradients.clip(optimizer, max_norm, self.device)
        if found is not None:
            self._note(optimizer, found)

    def norm_of(self, optimizer: Optimizer, needed: bool = True) -> Tensor | None:
        """The L2 norm of the optimizer's true gradients before clipping, FP32 scalar; None where it is unknown.

        Where ``clip`` was not called, the norm is computed if ``needed``; a collective with sharded gradients.
        """
        self.unscale(optimizer)
        return self._gradients.norm(optimizer, needed and not self.columns.states.releases)

    def check_finite(self, optimizer: Optimizer) -> None:
        """Look for non-finite gradients of the optimizer, unless ``clip`` has computed their norm."""
        self.unscale(optimizer)
        if optimizer not in self._found and not self.columns.states.releases:
            self._note(optimizer, self._gradients.find(optimizer, self.device))

    def _note(self, optimizer: Optimizer, found: Tensor) -> None:
        # Amaxes are reduced once a backward pass. Backward passes are announced where the loss is scaled.
        looked = self.loss_scale is not None and len(self._found) > 0
        self._found[optimizer] = FoundInf(self.found_on_any_rank(found, looked))

    def found_on_any_rank(self, found: Tensor, looked: bool = False) -> Tensor:
        """Whether a gradient or an operand of an FP8 GEMM is not finite on any process: FP32 scalar, 1 or 0.

        Args:
            found: the same for the gradients of this process.
            looked: whether another optimizer of this backward pass has reduced the amaxes. Else one all-reduce
                carries the amaxes and the flags.
        """
        saturated = None if looked else self.saturated()
        flags = torch.stack([flag.float().reshape(()) for flag in (found, saturated) if flag is not None])
        if looked or not any([one.reduce(flags) for one in self.columns.amaxes]):
            self.columns.comm.any_rank(flags)
        if not looked:
            self._saturated = None if saturated is None else flags[1]
        return flags[0] if self._saturated is None else torch.maximum(flags[0], self._saturated)

    def saturated(self) -> Tensor | None:
        """Whether an operand of an FP8 GEMM was not finite on this process, a bool scalar; None without FP8 GEMMs."""
        flags = [flag for one in self.columns.amaxes if (flag := one.nonfinite()) is not None]
        return torch.stack(flags).any() if flags else None

    def run(self, optimizer: Optimizer, **kwargs: Any) -> Any:
        """``optimizer.step(**kwargs)``, which is skipped where a gradient is not finite on any process."""
        self.check_finite(optimizer)
        found = self._found.get(optimizer)
        handles = found is not None and handles_found_inf(optimizer, self.columns.weights.is_sharded)
        with found.handed_to(optimizer) if found is not None and handles else nullcontext():
            result = self.take(optimizer, found, partial(optimizer.step, **kwargs), waits=not handles)
        if self.loss_scale is None:
            self._found.pop(optimizer, None)  # without loss scaling a backward pass may not be announced
        return result

    def run_with_closure(self, optimizer: Optimizer, closure: Callable[[], Any], **kwargs: Any) -> Any:
        """``run`` for an optimizer that evaluates the loss itself, by ``closure``."""
        closure = self.columns.evaluating(optimizer, closure)
        return self.take(optimizer, None, partial(optimizer.step, closure=closure, **kwargs))

    def take(self, optimizer: Optimizer, found: FoundInf | None, step: Callable[[], Any], waits: bool = True) -> Any:
        """Call ``step`` unless ``found``, and tell the columns. Only with ``waits`` the host reads ``found`` before."""
        differ = self.columns.weights.find_written(optimizer)
        written, result = None if differ is None else FoundInf(differ.float()), None
        # Manual optimization steps inside training_step, under autocast.
        with torch.autocast(self.device.type, enabled=False), self.observers.updating(optimizer):
            if not (waits and found):
                result = step()
            # The host goes on while the device steps, as far as it can take back what it has done.
            early = not waits and found is not None and not self.columns.weights.is_sharded
            for column in self.columns if early else ():
                column.after_step(False)
            skipped = bool(found)
            if written:
                self.columns.weights.refuse_written()
            if self.loss_scale is not None and found is not None:
                self.loss_scale.learn(skipped)
            for column in self.columns:
                if not early:
                    column.after_step(skipped)
                elif skipped:
                    column.take_back()
        (self.skipped.add if skipped else self.skipped.discard)(optimizer)
        for see in self.observers.step:
            see(optimizer, skipped)
        return None if skipped else result

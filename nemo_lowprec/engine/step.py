"""What surrounds an optimizer's step, the same for every loop: loss scale, unscale, clip, skip, refresh, histories."""

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
        columns: of the row, for this model.
        loss_scale: of the level; None for a level without.
        device: of the model.
        unit: what the gradients are multiplied by whose amaxes are in the histories; None: unknown.
        skipped: the optimizers whose last step was skipped because a gradient is not finite.
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
        """The loss to run backward from."""
        return loss * scale if (scale := self.begin()) != 1 else loss

    def begin(self, micro_batches: int = 1) -> float:
        """A backward pass begins, of losses that are divided by ``micro_batches``. Returns the loss scale."""
        for column in self.columns:
            column.before_backward()
        self._found.clear()
        self._gradients.begin()
        scale = 1.0 if self.loss_scale is None else self.loss_scale.begin()
        self.expect(scale / micro_batches)
        return scale

    def expect(self, unit: float) -> None:
        """Gradients come multiplied by ``unit``: the scales of FP8 operands must leave room for them."""
        before, self.unit = self.unit, unit
        if before is not None and before != unit:
            for amaxes in self.columns.amaxes:
                amaxes.expect(unit / before)

    def unscale(self, optimizer: Optimizer) -> None:
        """Make the optimizer's gradients true gradients, once a backward pass."""
        if optimizer not in self._found:
            self._gradients.unscale(optimizer, self.device)

    def clip(self, optimizer: Optimizer, max_norm: float) -> None:
        """Scale the optimizer's true gradients down to ``max_norm``; the norm shows, too, whether all are finite."""
        self.unscale(optimizer)
        found = self._gradients.clip(optimizer, max_norm, self.device)
        if found is not None:
            self._note(optimizer, found)

    def norm_of(self, optimizer: Optimizer, needed: bool = True) -> Tensor | None:
        """The L2 norm of the optimizer's true gradients before clipping, FP32 scalar; None where it is unknown.

        Where ``clip`` was not called, the norm is computed if ``needed``; a collective with sharded gradients.
        """
        self.unscale(optimizer)
        return self._gradients.norm(optimizer, needed and not self.columns.releases)

    def check_finite(self, optimizer: Optimizer) -> None:
        """Find out whether the optimizer's gradients are finite, where ``clip`` has not."""
        self.unscale(optimizer)
        if optimizer not in self._found and not self.columns.releases:
            self._note(optimizer, self._gradients.find(optimizer, self.device))

    def _note(self, optimizer: Optimizer, found: Tensor) -> None:
        # The loss scale announces backward passes. Amaxes are looked at once a pass: a step makes room for the next.
        looked = self.loss_scale is not None and len(self._found) > 0
        self._found[optimizer] = FoundInf(self.found_on_any_rank(found, looked))

    def found_on_any_rank(self, found: Tensor, looked: bool = False) -> Tensor:
        """Whether a gradient (``found`` on this process) or an FP8 operand is not finite on any process: 1 or 0, FP32.

        One all-reduce carries the amaxes, too, unless another optimizer of this backward pass has ``looked`` at them.
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
        """``optimizer.step(**kwargs)``, but for a gradient that is not finite on some process: see ``skipped``."""
        self.check_finite(optimizer)
        found = self._found.get(optimizer)
        handles = found is not None and handles_found_inf(optimizer, self.columns.weights.is_sharded)
        with found.handed_to(optimizer) if found is not None and handles else nullcontext():
            result = self.take(optimizer, found, partial(optimizer.step, **kwargs), waits=not handles)
        if self.loss_scale is None:
            self._found.pop(optimizer, None)  # the next backward pass is perhaps not announced
        return result

    def run_with_closure(self, optimizer: Optimizer, closure: Callable[[], Any], **kwargs: Any) -> Any:
        """The same for an optimizer that evaluates the loss itself."""
        closure = self.columns.evaluating(optimizer, closure)
        return self.take(optimizer, None, partial(optimizer.step, closure=closure, **kwargs))

    def take(self, optimizer: Optimizer, found: FoundInf | None, step: Callable[[], Any], waits: bool = True) -> Any:
        """Call ``step`` unless ``found``, and tell the columns; kernels that read ``found`` need no host that waits."""
        differ = self.columns.weights.find_written(optimizer)
        written, result = None if differ is None else FoundInf(differ.float()), None
        # Manual optimization steps inside training_step, under autocast.
        with torch.autocast(self.device.type, enabled=False), self.observers.updating(optimizer):
            if not (waits and found):
                result = step()
            skipped = bool(found)
            if written:
                self.columns.weights.refuse_written()
            if self.loss_scale is not None and found is not None:
                self.loss_scale.learn(skipped)
            for column in self.columns:
                column.after_step(skipped)
        (self.skipped.add if skipped else self.skipped.discard)(optimizer)
        for see in self.observers.step:
            see(optimizer, skipped)
        return None if skipped else result

"""Runs optimizer steps for every loop: loss scale, unscale, clip, skip, refresh of weights, amax histories.

The device finds out whether a gradient is not finite, and kernels that read the flag skip the step by themselves. The
host does not wait for the flag: the host goes on with the next forward pass, and reads the flag when the next backward
pass begins (``Step.settle``). Code that asks for the outcome earlier waits.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
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


@dataclass
class _Taken:
    """A step whose outcome the host does not know yet.

    Attributes:
        found: whether a gradient was not finite; None for a step that nobody has looked at.
        written: whether half copies of weights differ from their masters; None for a level without masters.
        told: whether the columns have the flag on the device.
    """

    optimizer: Optimizer
    found: FoundInf | None
    written: FoundInf | None
    told: bool


class Step:
    """The steps of one model's optimizers.

    Attributes:
        columns: the columns of the row, for this model.
        has_loss_scale: whether the level scales the loss.
        device: the model's.
        unit: the factor in the gradients whose amaxes are in the histories; None where the factor is unknown.
    """

    def __init__(self, columns: Columns, loss_scale: LossScale | None, observers: Observers) -> None:
        self.columns, self.observers = columns, observers
        self.has_loss_scale = loss_scale is not None
        self.device = torch.device("cpu")
        self.unit: float | None = 1.0 if loss_scale is None else loss_scale.used
        self._loss_scale = loss_scale
        self._skipped: WeakSet[Optimizer] = WeakSet()
        self._taken: _Taken | None = None
        self._gradients = TrueGradients(loss_scale)
        self._found: WeakKeyDictionary[Optimizer, FoundInf] = WeakKeyDictionary()
        self._saturated: Tensor | None = None
        self._norms: WeakKeyDictionary[Optimizer, Tensor] = WeakKeyDictionary()  # of gradients that wait for their step

    @property
    def loss_scale(self) -> LossScale | None:
        """The level's, after the last step; None for a level without loss scaling. The host waits for the step."""
        if self._loss_scale is not None:
            self.settle()
        return self._loss_scale

    @property
    def skipped(self) -> WeakSet[Optimizer]:
        """The optimizers whose last step was skipped because a gradient was not finite. The host waits for the step."""
        self.settle()
        return self._skipped

    def is_open(self, optimizer: Optimizer) -> bool:
        """Whether the host does not know yet if the last step of ``optimizer`` was skipped."""
        return self._taken is not None and self._taken.optimizer is optimizer

    def settle(self) -> None:
        """Learn whether the last step was skipped, and tell the columns and the observers; the host waits.

        Raises:
            RuntimeError: see ``WeightStore.refuse_written``.
        """
        taken, self._taken = self._taken, None
        if taken is not None:
            self._learn(taken)

    def _learn(self, taken: _Taken) -> bool:
        """Wait for the outcome of a step, and tell everybody; whether the step was skipped."""
        skipped = bool(taken.found)
        if taken.written:
            self.columns.weights.refuse_written()
        if self._loss_scale is not None and taken.found is not None:
            self._loss_scale.learn(skipped)
        for column in self.columns:
            if not taken.told:
                column.after_step(skipped)
            elif skipped:
                column.take_back()
        (self._skipped.add if skipped else self._skipped.discard)(taken.optimizer)
        for see in self.observers.step:
            see(taken.optimizer, skipped)
        return skipped

    def scale(self, loss: Tensor) -> Tensor:
        """The scaled loss; announces the backward pass, see ``begin``."""
        return loss * scale if (scale := self.begin()) != 1 else loss

    def begin(self, micro_batches: int = 1) -> float:
        """Announce a backward pass, of losses that are divided by ``micro_batches``. Returns the loss scale."""
        self.settle()
        for column in self.columns:
            column.before_backward()
        self._found.clear()
        self._norms.clear()
        self._gradients.begin()
        scale = 1.0 if self._loss_scale is None else self._loss_scale.begin()
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
        if optimizer not in self._norms:
            self.unscale(optimizer)
            norm = self._gradients.norm(optimizer, needed and not self.columns.states.releases)
            if norm is None:
                return None
            self._norms[optimizer] = norm
        return self._norms[optimizer]

    def check_finite(self, optimizer: Optimizer) -> None:
        """Look for non-finite gradients of the optimizer, unless ``clip`` has computed their norm."""
        self.unscale(optimizer)
        if optimizer not in self._found and not self.columns.states.releases:
            self._note(optimizer, self._gradients.find(optimizer, self.device))

    def _note(self, optimizer: Optimizer, found: Tensor) -> None:
        # Amaxes are reduced once a backward pass. Backward passes are announced where the loss is scaled.
        looked = self.has_loss_scale and len(self._found) > 0
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
        """``optimizer.step(**kwargs)``, which is skipped where a gradient is not finite on any process.

        Returns:
            what ``optimizer.step`` returns; None where the host knows that the step was skipped.
        """
        self.check_finite(optimizer)
        found = self._found.get(optimizer)
        handles = found is not None and handles_found_inf(optimizer, self.columns.weights.is_sharded)
        with found.handed_to(optimizer) if found is not None and handles else nullcontext():
            result = self.take(optimizer, found, partial(optimizer.step, **kwargs), waits=not handles)
        if not self.has_loss_scale:
            self._found.pop(optimizer, None)  # without loss scaling a backward pass may not be announced
        return result

    def run_with_closure(self, optimizer: Optimizer, closure: Callable[[], Any], **kwargs: Any) -> Any:
        """``run`` for an optimizer that evaluates the loss itself, by ``closure``."""
        closure = self.columns.evaluating(optimizer, closure)
        return self.take(optimizer, None, partial(optimizer.step, closure=closure, **kwargs))

    def take(self, optimizer: Optimizer, found: FoundInf | None, step: Callable[[], Any], waits: bool = True) -> Any:
        """Call ``step`` unless ``found``, and tell the columns.

        Args:
            waits: whether the host reads ``found`` before; else the kernels of ``step`` do.
        """
        self.settle()
        differ = self.columns.weights.find_written(optimizer)
        written, result = None if differ is None else FoundInf(differ.float()), None
        # Manual optimization steps inside training_step, under autocast.
        with torch.autocast(self.device.type, enabled=False), self.observers.updating(optimizer):
            if not (waits and found):
                result = step()
            self._norms.pop(optimizer, None)
            # What the host does here, and what it can take back, it does while the device steps.
            told = not waits and found is not None and not self.columns.weights.is_sharded
            late = told and not any(column.waits for column in self.columns)
            for column in self.columns if told else ():
                column.after_step(found.on_device)  # type: ignore[union-attr]
            taken = _Taken(optimizer, found, written, told)
            if late:
                self._taken = taken
            elif self._learn(taken):
                return None
        return result

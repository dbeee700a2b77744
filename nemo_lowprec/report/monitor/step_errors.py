"""Gathers the errors of one step: of operands, stored gradients, updates and messages."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack

import torch
from torch import Tensor
from torch.optim import Optimizer

from nemo_lowprec.formats.errors import decibels
from nemo_lowprec.report.monitor.operands import GradientErrors, OperandErrors
from nemo_lowprec.report.monitor.sample import Sample, operands_of, params_of
from nemo_lowprec.report.monitor.shared import names_of_all
from nemo_lowprec.report.monitor.subject import Subject
from nemo_lowprec.report.monitor.te_operands import TEOperands
from nemo_lowprec.report.monitor.updates import UpdateErrors
from nemo_lowprec.report.monitor.wire import WireErrors


class StepErrors:
    """Adds up the errors between ``begin`` and ``end``. The constructor is a collective.

    Args:
        subject: the model, converted.

    Attributes:
        params: names of the parameters of all processes.
    """

    def __init__(self, subject: Subject) -> None:
        self._subject = subject
        params = subject.params()
        self.params = names_of_all(list(params))
        ordered = [params.get(name) for name in self.params]
        self._operands = OperandErrors(names_of_all(subject.layers()), subject.device)
        layers, recipe = subject.te_layers(), subject.options.recipe
        has_te = bool(layers) and recipe is not None
        self._te = TEOperands(layers, recipe, self._operands, subject.device) if has_te else None  # type: ignore[arg-type]
        self._gradients = GradientErrors(ordered, subject.device)
        self._updates = UpdateErrors(ordered, subject.device)
        self._wire = WireErrors(subject.device)
        self._norm: Tensor | None = None
        self._window = ExitStack()

    def begin(self) -> None:
        """Forget the last step, and observe from now on."""
        self._norm = None
        self._operands.table.clear()
        self._gradients.begin(self._subject.owners())
        self._updates.clear()
        self._wire.clear()
        for observer in (self._operands, self._gradients, self._wire):
            self._window.enter_context(self._subject.observers.watched_by(observer))
        if self._te is not None:
            self._te.watch(self._window)

    def end(self) -> None:
        """Observe no longer."""
        self._window.close()

    def before_update(self, optimizer: Optimizer) -> None:
        """Read what ``optimizer`` is about to update, and the norm of the gradients."""
        self._norm = self._subject.grad_norm(optimizer)
        for stepper in self._subject.steppers(optimizer):
            self._updates.before(stepper, self._subject.grad_scale(optimizer))

    def after_update(self) -> None:
        """Read what was updated."""
        self._updates.after()

    def tensors(self) -> tuple[list[Tensor], list[Tensor]]:
        """The errors on the device: tensors to add up over the processes, and tensors to take maxima of."""
        device, norm = self._subject.device, self._norm
        extremes = self._operands.table.extremes.clone()
        extremes[:, 1].neg_()  # the smallest magnitude
        norm = torch.full((1,), torch.nan, device=device, dtype=torch.float32) if norm is None else norm.to(device)
        sums = [self._operands.table.sums, self._gradients.table.sums, self._updates.sums, self._wire.sums]
        return sums, [extremes, norm.reshape(1)]

    def sample(self, errors: Sequence[Tensor], step: int, skipped: bool, skipped_steps: int) -> Sample:
        """The sample of ``step``.

        Args:
            errors: the sums and the maxima of ``tensors``, over all processes, FP64 on the CPU.
            step: its number.
            skipped: whether the step was skipped.
            skipped_steps: skipped steps so far.
        """
        operands, gradients, updates, wire, extremes, norm = errors
        extremes[:, 1] = -extremes[:, 1]
        rows, metrics = operands_of(self._operands.rows, operands, extremes)
        of_params = params_of(updates, gradients, skipped)
        wire_sqnr, scale = float(decibels(*wire)), self._subject.loss_scale
        return Sample(
            step, rows, metrics, self.params, of_params, wire_sqnr, float(norm), scale, skipped, skipped_steps
        )

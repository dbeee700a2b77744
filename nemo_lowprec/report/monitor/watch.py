"""Decides which steps of a training are sampled, and writes their samples to the run's file."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from nemo_lowprec.observers import Observer
from nemo_lowprec.report.monitor.records import Records
from nemo_lowprec.report.monitor.run_writer import RunWriter
from nemo_lowprec.report.monitor.sample import Sample
from nemo_lowprec.report.monitor.shared import Reading
from nemo_lowprec.report.monitor.step_errors import StepErrors
from nemo_lowprec.report.monitor.stretch import Stretch
from nemo_lowprec.report.monitor.subject import Subject


def check_every(every_n_steps: int) -> int:
    """``every_n_steps``, or ValueError where it is no number of steps."""
    if isinstance(every_n_steps, bool) or not isinstance(every_n_steps, int) or every_n_steps < 1:
        raise ValueError(f"every_n_steps={every_n_steps!r} must be a number of steps, at least 1.")
    return every_n_steps


class Monitor(Observer):
    """Samples the second step and every ``every_n_steps``-th step, from the first forward pass to the update.

    The numbers of a sampled step are read, and written to the file, one step later: the host does not wait for them.
    With several optimizers every update counts as a step, and a sample ends when each of them has stepped.

    Args:
        subject: the model, converted.
        writer: of the run's file, on the process that writes; None on the others.
        every_n_steps: distance of the samples.
        start: number of steps that were taken before.
        told: each is called with each ``Sample``, one step after it.

    Attributes:
        steps: number of steps so far.
        tokens: of all processes so far; None where nobody counts them.
    """

    def __init__(
        self,
        subject: Subject,
        writer: RunWriter | None,
        every_n_steps: int = 50,
        start: int = 0,
        told: Sequence[Callable[[Sample], None]] = (),
    ) -> None:
        self.subject, self._every, self._start, self._told = subject, every_n_steps, start, told
        self._records = Records(writer)
        self.steps, self._skipped_steps = start, 0
        self._is_updating, self._skips = False, False
        self.tokens: int | None = None
        self._errors = StepErrors(subject)
        self._is_open = False
        self._last: Optimizer | None = None  # the optimizer that has stepped last
        self._losses: list[tuple[int, Tensor]] = []  # with the numbers of their steps
        self._pending: _Pending | None = None
        self._stretch = Stretch(start)
        self._subscription = ExitStack()
        self._subscription.enter_context(subject.observers.watched_by(self))
        self._records.params(self._errors.params)
        self._open_if_due()

    # What the engine tells

    def before_update(self, optimizer: Optimizer) -> None:
        self._is_updating = True
        if self._is_open:
            self._errors.before_update(optimizer)

    def after_update(self, optimizer: Optimizer) -> None:
        self._write_pending()
        self._is_updating = False
        self.steps += 1
        if self._is_open:
            self._errors.after_update()
            if self._last is None or self._last is optimizer:
                self._end_sample()
                self._pending = self._reading(self.steps)
        if not self._is_open:  # else other optimizers step before the sample ends
            self._last = optimizer
            self._open_if_due()
        self._skips = False

    def step(self, optimizer: Optimizer, skipped: bool) -> None:
        self._skipped_steps += skipped
        if self._is_updating:
            self._skips = skipped
        elif skipped and self._pending is not None:  # on a GPU the outcome is known later
            self._pending.skipped = True
            self._pending.skipped_steps += 1

    # What the loop tells

    def add_loss(self, loss: Tensor) -> None:
        """Note the loss of the last step, a scalar on the model's device."""
        self._losses.append((self.steps, loss.detach().float().reshape(1).clone()))

    def pause(self) -> None:
        """Stop the clock: what comes is no training."""
        self._stretch.pause()

    def resume(self) -> None:
        """Start the clock again."""
        self._stretch.resume()

    def validated(self, metrics: dict[str, float]) -> None:
        """Write the metrics of a validation after the last step."""
        if metrics:
            self._records.validation(self.steps, metrics)

    def close(self, finished: bool) -> None:
        """Write what is left, and watch no longer; a collective where all processes have ``finished``.

        Args:
            finished: whether the training has ended in order.
        """
        self._end_sample()
        self._subscription.close()
        self._write_pending()
        if finished and self._losses:
            self._pending = self._reading(None)
            self._write_pending()
        if finished:
            self._records.end(self.steps)

    # Samples

    def _open_if_due(self) -> None:
        step = self.steps + 1
        if step % self._every and step != self._start + 2:
            return
        self._is_open = True
        self._errors.begin()

    def _end_sample(self) -> None:
        self._is_open = False
        self._errors.end()

    def _reading(self, step: int | None) -> _Pending:
        """The errors of the sample of ``step``, or of no sample, and the losses so far, on their way to the host."""
        one = torch.ones(1, dtype=torch.float32, device=self.subject.device)
        losses = torch.cat([*(loss for _, loss in self._losses), one])
        at, self._losses = [number for number, _ in self._losses], []
        sums, maxima = self._errors.tensors()
        reading = Reading([losses, *sums], maxima, self.subject.observers)
        stretch = self._stretch.cut(self.steps, self.tokens)
        return _Pending(step, at, reading, stretch, self._skips, self._skipped_steps)

    def _write_pending(self) -> None:
        pending, self._pending = self._pending, None
        if pending is None:
            return
        losses, *errors = pending.reading.read()
        self._records.steps(pending.at, losses[:-1] / losses[-1], pending.stretch, self.subject.device)
        if pending.step is None:
            return
        sample = self._errors.sample(errors, pending.step, pending.skipped, pending.skipped_steps)
        self._records.sample(sample)
        for told in self._told:
            told(sample)


@dataclass
class _Pending:
    """Numbers on their way to the host.

    Attributes:
        step: the sampled step; None for losses alone.
        at: the numbers of the steps of the losses.
        reading: the losses, behind them the number of processes, and the errors of the step.
        stretch: of the steps since the last reading, as the file has it.
        skipped: whether the step was skipped.
        skipped_steps: skipped steps up to this one.
    """

    step: int | None
    at: list[int]
    reading: Reading
    stretch: dict[str, Any]
    skipped: bool
    skipped_steps: int

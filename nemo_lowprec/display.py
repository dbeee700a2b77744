"""The progress bar and the start-up table of ``pretrain``, in place of Lightning's model summary and epoch count."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import ModelSummary, RichModelSummary, RichProgressBar
from typing_extensions import override

from nemo_lowprec.compat.lightning import max_depth
from nemo_lowprec.plugins import LowPrecision


class _ProgressBar(RichProgressBar):
    """Lightning's progress bar for a run that ends after a number of steps."""

    @override
    def _get_train_description(self, current_epoch: int) -> str:
        if self.trainer.max_epochs != -1:
            return super()._get_train_description(current_epoch)
        # Lightning would write "Epoch 0/-2" (seen in 2.6). Padded to the width of the validation bar's description, so
        # that both bars start in one column.
        return f"Epoch {current_epoch}".ljust(len(self.validation_description))

    @property
    @override
    def total_train_batches(self) -> int | float:
        trainer = self.trainer
        if trainer.max_epochs != -1 or trainer.max_steps < 0:
            return super().total_train_batches
        # Lightning counts one batch for a step, and no batches before a resume in mid-epoch. A resumed run makes its
        # first bar after those batches; a bar that exists already is at the beginning of an epoch.
        done = 0 if self.train_progress_bar_id is not None else trainer.fit_loop.batch_idx + 1
        left = (trainer.max_steps - trainer.global_step) * trainer.accumulate_grad_batches
        return min(trainer.num_training_batches, done + left)


@contextmanager
def own_display(trainer: Trainer) -> Iterator[None]:
    """Make a fit of ``trainer`` show this package's start-up table, and count epochs only where ``max_epochs`` is set.

    At a level of this package Lightning's default model summary is left out: a model of one module is one line of the
    summary, and its FLOPs are 0 without an example input. A summary of another depth stays, and a progress bar of
    another class than Lightning's stays.
    """
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
    ours = isinstance(trainer.precision_plugin, LowPrecision)
    left_out = [c for c in callbacks if ours and _is_default_summary(c)]
    bars = [c for c in callbacks if type(c) is RichProgressBar]
    callbacks[:] = [c for c in callbacks if c not in left_out]
    for bar in bars:
        bar.__class__ = _ProgressBar
    try:
        yield
    finally:
        for bar in bars:
            bar.__class__ = RichProgressBar
        callbacks[:0] = left_out


def _is_default_summary(callback: Callback) -> bool:
    return type(callback) in (ModelSummary, RichModelSummary) and max_depth(callback) == 1

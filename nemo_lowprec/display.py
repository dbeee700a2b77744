"""What ``pretrain`` shows of a run in place of Lightning's model summary and epoch count."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import ModelSummary, RichModelSummary, RichProgressBar
from typing_extensions import override

from nemo_lowprec.plugins import LowPrecision

__all__ = ["own_display"]


class _ProgressBar(RichProgressBar):
    """Lightning's progress bar for a run whose end is a number of steps."""

    @override
    def _get_train_description(self, current_epoch: int) -> str:
        if self.trainer.max_epochs != -1:
            return super()._get_train_description(current_epoch)
        # Lightning would write "Epoch 0/-2" (seen in 2.6). As wide as the bar below, which else would move this one.
        return f"Epoch {current_epoch}".ljust(len(self.validation_description))

    @property
    @override
    def total_train_batches(self) -> int | float:
        trainer = self.trainer
        if trainer.max_epochs != -1 or trainer.max_steps < 0:
            return super().total_train_batches
        # Lightning takes a step for one batch, and forgets the batches before a resume in mid-epoch. The first bar of a
        # run is made after them; where there is one already, an epoch begins.
        done = 0 if self.train_progress_bar_id is not None else trainer.fit_loop.batch_idx + 1
        left = (trainer.max_steps - trainer.global_step) * trainer.accumulate_grad_batches
        return min(trainer.num_training_batches, done + left)


@contextmanager
def own_display(trainer: Trainer) -> Iterator[None]:
    """Have a fit of ``trainer`` show our start-up table alone, and count epochs only where there is a last one.

    The model summary that every Trainer has is left out at a level of this package: a model that is one module is one
    line of it, and its FLOPs are 0 without an example input. A summary of another depth stays, as does any progress
    bar but Lightning's own.
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
    return type(callback) in (ModelSummary, RichModelSummary) and getattr(callback, "_max_depth", None) == 1

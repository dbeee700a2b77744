"""Signals that end or requeue a run of several processes: all of them act between the same two training steps.

Lightning's handlers call collectives at once, wherever the signal finds a process: inside another collective, or some
collectives behind the other processes. The handlers here note the signal only. Lightning's loop exchanges a flag before
each batch, and this flag carries the signal.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.utilities.exceptions import SIGTERMException

from nemo_lowprec.compat import lightning as compat
from nemo_lowprec.grads import FoundInf
from nemo_lowprec.plugins.replaced import replace_attribute

_NOTHING, _REQUEUE, _END = 0.0, 1.0, 2.0  # the value of the flag; the processes take the maximum


class StopTogether:
    """Replaces Lightning's handlers of SIGTERM and of SLURM's requeue signal while a Trainer runs.

    Args:
        trainer: a Trainer of several processes, whose process group exists.
        undo: gives Lightning its methods back when it is closed.
        evaluates_in_step: whether every step of an evaluation calls collectives, so that no process can leave alone.
        between_steps: whether to wait for the end of a step, for a strategy whose checkpoints hold no gradients.
    """

    def __init__(
        self, trainer: pl.Trainer, undo: ExitStack, evaluates_in_step: bool, between_steps: bool = False
    ) -> None:
        self.trainer = trainer
        self.evaluates_in_step = evaluates_in_step
        self._between_steps = between_steps
        self._wanted = _NOTHING
        self._signum = 0
        self._answers: dict[bool, FoundInf] = {}  # in training (False) and in an evaluation (True)
        connector, loop = compat.signal_connector(trainer), trainer.fit_loop.epoch_loop
        self._requeue = getattr(connector, compat.REQUEUE_METHOD)
        for owner, name, own in (
            (connector, compat.SIGTERM_METHOD, self._on_end),
            (connector, compat.REQUEUE_METHOD, self._on_requeue),
            (loop, compat.EXCHANGE_METHOD, self._before_batch),
        ):
            replace_attribute(undo, owner, name, own)

    def before_evaluation_step(self) -> None:
        """End the run if a signal asks for it; called before each step of an evaluation.

        Raises:
            SIGTERMException: the run is to end; on all processes at once, if they evaluate in step.
        """
        if self.evaluates_in_step:
            self._exchange(self._wanted if self._wanted == _END else _NOTHING, evaluates=True)
        elif self._wanted == _END:
            self._end()

    def _on_end(self, signum: int, frame: Any) -> None:
        launcher = self.trainer.strategy.launcher
        if self._wanted != _END and launcher is not None:
            launcher.kill(signum)  # type: ignore[attr-defined]
        self._wanted = _END

    def _on_requeue(self, signum: int, frame: Any) -> None:
        self._wanted, self._signum = max(self._wanted, _REQUEUE), signum

    def _before_batch(self) -> None:
        if self._between_steps and compat.is_mid_step(self.trainer):
            return
        self._exchange(self._wanted)

    def _exchange(self, wanted: float, evaluates: bool = False) -> None:
        """All-reduce the flag, and act on the maximum; on a GPU one step later, when the maximum is on the host."""
        device = self.trainer.strategy.root_device
        if device.type == "cuda" and self._act(evaluates):
            return
        flag = torch.full((), wanted, device=device, dtype=torch.float32)
        dist.all_reduce(flag, dist.ReduceOp.MAX)
        self._answers[evaluates] = FoundInf(flag)
        if device.type != "cuda":
            self._act(evaluates)

    def _act(self, evaluates: bool) -> bool:
        """Act on the last maximum. Returns whether a process has asked for an end or a requeue."""
        answer = self._answers.pop(evaluates, None)
        if answer is None or not answer:
            return False
        if float(answer.on_device) == _END:
            self._end()
        if self._wanted == _REQUEUE:  # a SIGTERM that has come meanwhile stays noted
            self._wanted = _NOTHING
        self._requeue(self._signum, None)  # type: ignore[arg-type]
        return True

    def _end(self) -> None:
        compat.signal_connector(self.trainer).received_sigterm = True
        raise SIGTERMException

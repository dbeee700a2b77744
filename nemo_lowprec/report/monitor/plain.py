"""The monitor in a training loop without Lightning."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType

import torch.distributed as dist
from torch import Tensor, nn

from nemo_lowprec.engine import Engine
from nemo_lowprec.report.monitor.about import about_run
from nemo_lowprec.report.monitor.alarm import Alarm
from nemo_lowprec.report.monitor.run_writer import RunWriter
from nemo_lowprec.report.monitor.subject import Subject
from nemo_lowprec.report.monitor.watch import Monitor, check_every


class PlainMonitor:
    """Watches a model from now on until ``close``; a context closes it, too.

    Attributes:
        path: of the run's file.
    """

    def __init__(self, model: nn.Module, folder: str | Path, every_n_steps: int, start: int) -> None:
        engine = Engine.of(model)
        if engine is None:
            raise ValueError("monitor() needs a model at a level of this package: call nemo_lowprec.prepare first.")
        subject = Subject(engine)
        several = dist.is_initialized()
        self._writer = RunWriter(Path(folder)) if not several or dist.get_rank() == 0 else None
        if self._writer is not None:
            record = about_run(
                model, engine.options, subject.conversion, "ddp" if several and dist.get_world_size() > 1 else "single",
                start=start, every_n_steps=every_n_steps,
            )  # fmt: skip
            self._writer.write("run", **record)
        self.path = Path(folder)
        told = [] if self._writer is None else [Alarm(subject, self._writer).look]
        self._monitor: Monitor | None = Monitor(subject, self._writer, every_n_steps, start, told)

    def add_loss(self, loss: Tensor) -> None:
        """Note the loss of the step that was just taken, a scalar on the model's device; the host does not wait."""
        if self._monitor is not None:
            self._monitor.add_loss(loss)

    def add_validation(self, **metrics: float) -> None:
        """Note the metrics of a validation."""
        if self._monitor is not None:
            self._monitor.validated(metrics)

    def close(self, finished: bool = True) -> None:
        """Watch no longer.

        Args:
            finished: whether the training has ended in order. With several processes a collective.
        """
        monitor, self._monitor = self._monitor, None
        if monitor is not None:
            monitor.close(finished)
            if self._writer is not None:
                self._writer.close()

    def __enter__(self) -> PlainMonitor:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close(finished=error is None)


def monitor(model: nn.Module, folder: str | Path, every_n_steps: int = 50, start: int = 0) -> PlainMonitor:
    """Watch what low precision does to a model that ``prepare`` or ``initialize`` has converted, in the user's loop.

    ::

        with nemo_lowprec.monitor(model, "runs/first") as watch:
            for batch in batches:
                loss = loss_of(model, batch)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                watch.add_loss(loss)

    See ``PrecisionMonitor`` for what is noted; nothing is audited. All processes call this function.

    Args:
        model: the converted model.
        folder: of the run, where the file ``monitor.jsonl`` is written.
        every_n_steps: distance of the samples, in optimizer steps.
        start: number of steps that were taken before, of a run that resumes.

    Raises:
        ValueError: the model is not converted, or ``every_n_steps`` is no number of steps.
    """
    return PlainMonitor(model, folder, check_every(every_n_steps), start)

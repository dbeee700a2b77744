"""The records of a monitored run, as ``run_writer`` has them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from nemo_lowprec.report.monitor.numbers import rounded, rounded_rows
from nemo_lowprec.report.monitor.run_writer import RunWriter
from nemo_lowprec.report.monitor.sample import Row, Sample


class Records:
    """Writes the samples of a monitor into the run's file; writes nothing on a process without a ``writer``.

    Args:
        writer: of the run's file, on the process that writes; None on the others.
    """

    def __init__(self, writer: RunWriter | None) -> None:
        self._writer = writer
        self._rows: Sequence[Row] = ()  # as written

    def params(self, names: Sequence[str]) -> None:
        """The names of the parameters in the samples that follow."""
        self._write("params", names=names)

    def steps(self, at: Sequence[int], losses: Tensor, stretch: Mapping[str, Any], device: torch.device) -> None:
        """The losses of the steps ``at``, the time of a stretch of steps, and the peak of the memory of ``device``."""
        if self._writer is None:
            return
        self._write("steps", at=at, loss=rounded(losses, 6), **stretch, peak_bytes=_peak_of(device))

    def sample(self, sample: Sample) -> None:
        """A sampled step; before it the rows of its operands, where they are others than before."""
        if self._writer is None:
            return
        if sample.rows != self._rows:
            self._rows = sample.rows
            self._write("operands", rows=sample.rows)
        step = torch.tensor([sample.wire_sqnr, sample.grad_norm], dtype=torch.float64, device="cpu")
        (wire, norm), *numbers = rounded_rows([step, *sample.operands.values(), *sample.params.values()])
        of_operands = len(sample.operands)
        self._write(
            "sample",
            step=sample.step,
            operands=dict(zip(sample.operands, numbers[:of_operands], strict=True)),
            params=dict(zip(sample.params, numbers[of_operands:], strict=True)),
            wire={"sqnr": wire},
            grad_norm=norm,
            loss_scale=sample.loss_scale,
            skipped_steps=sample.skipped_steps,
        )

    def validation(self, step: int, metrics: Mapping[str, float]) -> None:
        """The metrics of a validation after ``step``."""
        numbers = rounded(torch.tensor(list(metrics.values()), dtype=torch.float64, device="cpu"), 6)
        self._write("validation", step=step, metrics=dict(zip(metrics, numbers, strict=True)))

    def end(self, step: int) -> None:
        """The run has ended in order."""
        self._write("end", step=step)

    def _write(self, record: str, **values: Any) -> None:
        if self._writer is not None:
            self._writer.write(record, **values)


def _peak_of(device: torch.device) -> int | None:
    """The most bytes allocated on ``device``; None for a device that counts no memory."""
    if device.type != "cuda":
        return None
    # torch.cuda.max_memory_allocated makes a flat, sorted table of all statistics for this one.
    peak: int = torch.cuda.memory_stats_as_nested_dict(device)["allocated_bytes"]["all"]["peak"]
    return peak

"""Reads the file of a run: all attempts of one training as one history."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from nemo_lowprec.report.monitor.run_table import Row, Sampled, Table, sampled, table_of
from nemo_lowprec.report.monitor.run_writer import FILE, FORMAT


@dataclass
class Run:
    """The history of one training.

    Attributes:
        folder: of the run.
        attempts: the ``run`` records, the first start and the resumes.
        steps: numbers of the sampled steps, ascending.
        operands: rows (layer, operand); metrics amax, scale, underflow, saturation, sqnr, binades, nonfinite.
        params: rows (name,); metrics lost, weight_sqnr, gradient_sqnr, first_sqnr, second_sqnr.
        samples: the ``sample`` records of ``steps``, without the numbers of operands and parameters.
        loss: of each step, where it is known and finite.
        nonfinite: the steps whose loss was infinite or NaN.
        rates: (last step, steps, seconds, tokens) of each stretch that was timed; tokens may be None.
        peak_bytes: of the GPU; None on a CPU.
        validations: (step, metrics).
        audit: the ``audit`` record; None where no step was looked at.
        warnings: the ``warning`` records.
        ended: whether the last attempt has ended in order.
    """

    folder: Path
    attempts: list[dict[str, Any]] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)
    operands: Table = field(default_factory=Table)
    params: Table = field(default_factory=Table)
    samples: list[dict[str, Any]] = field(default_factory=list)
    loss: dict[int, float] = field(default_factory=dict)
    nonfinite: list[int] = field(default_factory=list)
    rates: list[tuple[int, int, float, int | None]] = field(default_factory=list)
    peak_bytes: int | None = None
    validations: list[tuple[int, dict[str, float]]] = field(default_factory=list)
    audit: dict[str, Any] | None = None
    warnings: list[dict[str, Any]] = field(default_factory=list)
    ended: bool = False

    @property
    def about(self) -> dict[str, Any]:
        """The ``run`` record of the last attempt."""
        return self.attempts[-1]

    @property
    def last_step(self) -> int:
        """The last step of which the file tells."""
        return max([0, *self.steps, *self.loss, *self.nonfinite, *(step for step, _ in self.validations)])

    @property
    def tokens_per_second(self) -> float | None:
        """The median over the stretches whose tokens are known; None where there is none."""
        rates = [tokens / seconds for _, _, seconds, tokens in self.rates if tokens is not None]
        return median(rates) if rates else None

    @property
    def val_losses(self) -> list[tuple[int, float]]:
        """(step, loss) of each validation whose loss is known and finite."""
        found = [(step, metrics.get("val/loss")) for step, metrics in self.validations]
        return [(step, loss) for step, loss in found if loss is not None]

    @property
    def nonfinite_from(self) -> int | None:
        """The step from which on no loss is finite; None where the last one is."""
        last = max(self.loss, default=0)
        return min((step for step in self.nonfinite if step > last), default=None)


def read_run(folder: str | Path) -> Run:
    """Read the run in ``folder``.

    Raises:
        ValueError: there is no such folder, no file of a run in it, or no record of a run in the file.
    """
    folder = Path(folder)
    if not folder.exists():
        raise ValueError(f"{folder} does not exist.")
    path = folder / FILE if folder.is_dir() else folder
    if not path.is_file():
        raise ValueError(f"{folder} has no {FILE}: train with monitor=True, or with the callback PrecisionMonitor.")
    run = Run(path.parent)
    tables = _Tables()
    for record in _records(path):
        kind = record.pop("record")
        if kind == "run":
            if record["format"] != FORMAT:
                raise ValueError(f"{path} has format {record['format']}, and this version reads format {FORMAT}.")
            _start(run, tables, record)
        elif not run.attempts:
            raise ValueError(f"{path} does not begin with the record of a run.")
        elif kind == "operands":
            tables.rows = [tuple(row) for row in record["rows"]]
        elif kind == "params":
            tables.params = [(name,) for name in record["names"]]
        else:
            _add(run, tables, kind, record)
    if not run.attempts:
        raise ValueError(f"{path} has no record of a run.")
    run.steps = sorted(tables.samples)
    samples = [tables.samples[step] for step in run.steps]
    run.samples = [sample.record for sample in samples]
    run.operands = table_of([sample.operands for sample in samples])
    run.params = table_of([sample.params for sample in samples])
    return run


class _Sample(NamedTuple):
    """A ``sample`` record, and apart from it the numbers of operands and parameters."""

    record: dict[str, Any]
    operands: Sampled
    params: Sampled


@dataclass
class _Tables:
    """The rows of the samples that follow, and the samples so far."""

    rows: list[Row] = field(default_factory=list)
    params: list[Row] = field(default_factory=list)
    samples: dict[int, _Sample] = field(default_factory=dict)


def _records(path: Path) -> Iterator[dict[str, Any]]:
    with path.open(encoding="utf-8", errors="replace") as file:
        for line in file:
            try:
                record = json.loads(line)
            except json.JSONDecodeError:  # a line that a kill has cut short
                continue
            if isinstance(record, dict) and "record" in record:
                yield record


def _start(run: Run, tables: _Tables, record: dict[str, Any]) -> None:
    """Begin an attempt: of what was noted before, the steps that the attempt takes again are dropped."""
    start = record["start"]
    run.attempts = [*run.attempts, record] if start else [record]
    run.ended = False
    tables.samples = {step: sample for step, sample in tables.samples.items() if step <= start}
    run.loss = {step: loss for step, loss in run.loss.items() if step <= start}
    run.nonfinite = [step for step in run.nonfinite if step <= start]
    run.rates = [rate for rate in run.rates if rate[0] <= start]
    run.validations = [found for found in run.validations if found[0] <= start]
    run.warnings = [found for found in run.warnings if found["step"] <= start]
    if not start:
        run.audit, run.peak_bytes = None, None


def _add(run: Run, tables: _Tables, kind: str, record: dict[str, Any]) -> None:
    if kind == "sample":
        operands, params = record.pop("operands"), record.pop("params")
        found = sampled(tables.rows, operands), sampled(tables.params, params)
        tables.samples[record["step"]] = _Sample(record, *found)
    elif kind == "steps":
        pairs = list(zip(record["at"], record["loss"], strict=True))
        run.loss |= {step: loss for step, loss in pairs if loss is not None}
        run.nonfinite += [step for step, loss in pairs if loss is None]
        if record["steps"]:
            run.rates.append((record["last"], record["steps"], record["seconds"], record["tokens"]))
        if record["peak_bytes"] is not None:
            run.peak_bytes = max(run.peak_bytes or 0, record["peak_bytes"])
    elif kind == "validation":
        run.validations.append((record["step"], record["metrics"]))
    elif kind == "audit":
        run.audit = record
    elif kind == "warning":
        operands = {(found["layer"], found["operand"]) for found in run.warnings}
        if (record["layer"], record["operand"]) not in operands:  # else an earlier attempt has warned of it
            run.warnings.append(record)
    elif kind == "end":
        run.ended = True

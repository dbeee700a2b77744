"""One warning while a run trains: the layer that low precision serves worst, and what to do about it."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from nemo_lowprec.lines import path_text
from nemo_lowprec.report.advice.paste import modules_of, python_line, with_skip
from nemo_lowprec.report.bounds import MAX_AMAX_RATIO, METRICS, PER_TENSOR, amax_ratios, ratios, said
from nemo_lowprec.report.curves import Numbers
from nemo_lowprec.report.monitor.run_writer import RunWriter
from nemo_lowprec.report.monitor.sample import Row, Sample
from nemo_lowprec.report.monitor.subject import Subject
from nemo_lowprec.report.page.words import OPERANDS

# Steps for which an operand must lie beyond its bounds. Under delayed scaling the activations of a new model outgrow
# their scales, for ten steps in a row in the main job; and gradients jump now and then, for a step.
_LASTS = 20


@dataclass
class Crossing:
    """An operand that lies beyond its bounds.

    Attributes:
        row: its layer and kind.
        since: the sampled step from which on the operand has lain beyond a bound.
        beyond: the smallest ratio to a bound since that step.
        text: the metrics beyond their bounds in the last sample.
        is_large_weight: whether the operand is a weight with an amax far above the median layer's.
    """

    row: Row
    since: int
    beyond: float
    text: str = ""
    is_large_weight: bool = False


class Alarm:
    """Warns once of layers whose operands lie beyond the bounds of ``report/bounds.py`` for twenty steps or more.

    Each such operand is noted in the run's file, once in an attempt.

    Args:
        subject: has the layers, and the level's options.
        writer: of the run's file.
    """

    def __init__(self, subject: Subject, writer: RunWriter) -> None:
        self._subject, self._writer = subject, writer
        self._has_one_scale = subject.options.level.scaling in PER_TENSOR
        self._open: dict[Row, Crossing] = {}
        self._noted: set[Row] = set()
        self._has_warned = False

    def look(self, sample: Sample) -> None:
        """Judge a sample. A step that was skipped says nothing: its gradients were not finite."""
        if sample.skipped:
            return
        metrics, beyond = self._judged(sample)
        is_open: dict[Row, Crossing] = {}
        for i in np.flatnonzero(beyond > 1).tolist():
            row = sample.rows[i]
            found = self._open.get(row) or Crossing(row, sample.step, float("inf"))
            found.beyond = min(found.beyond, float(beyond[i]))
            found.text = ", ".join(said(metrics, i))
            large = metrics.get("amax_ratio")
            found.is_large_weight = row[1] == "weight" and large is not None and bool(large[i] > MAX_AMAX_RATIO)
            is_open[row] = found
        self._open = is_open
        lasting = [found for found in is_open.values() if sample.step - found.since >= _LASTS]
        self._note([found for found in lasting if found.row not in self._noted], sample.step)
        if lasting and not self._has_warned:
            self._has_warned = True
            warnings.warn(self._sentences(lasting), stacklevel=2)

    def _judged(self, sample: Sample) -> tuple[dict[str, Numbers], Numbers]:
        """The metrics that have bounds, and for each row the largest ratio to a bound."""
        numbers = {name: sample.operands[name].numpy() for name in sample.operands}
        metrics = {name: numbers[name] for name in METRICS}
        if self._has_one_scale:
            metrics["amax_ratio"] = amax_ratios(sample.rows, numbers["amax"])
        return metrics, np.stack(list(ratios(metrics).values())).max(axis=0)

    def _note(self, crossings: Sequence[Crossing], step: int) -> None:
        for found in crossings:
            layer, operand = found.row
            text = f"{found.text} since step {found.since}"
            self._writer.write("warning", step=step, layer=layer, operand=operand, text=text)
            self._noted.add(found.row)

    def _sentences(self, crossings: Sequence[Crossing]) -> str:
        """The warning. A weight that is far too large comes first: such a weight may spoil the layers behind it."""
        worst = max(crossings, key=lambda found: (found.is_large_weight, found.beyond))
        layer, operand = worst.row
        others = len({found.row[0] for found in crossings} - {layer})
        more = f", and {others:,} more layer{'s lie' if others > 1 else ' lies'} beyond a bound" if others else ""
        report = f"nemo-lowprec report {path_text(self._writer.path.parent)} shows all layers."
        says = f"{layer}: its {OPERANDS[operand]} has {worst.text} since step {worst.since}{more}."
        return f"{says} {self._remedy(worst)} {report}"

    def _remedy(self, worst: Crossing) -> str:
        options = self._subject.options
        line = python_line(options.level.name, with_skip(options.chosen, [self._module_of(worst.row[0])]))
        if worst.is_large_weight:
            return f"Look at its initial values and at its learning rate; {line} keeps it in half precision."
        finer = ", or scale blocks of it, as bf16_with_fp8_subchannel_scaling_mixed does" if self._has_one_scale else ""
        return f"Keep it in half precision, {line}{finer}."

    def _module_of(self, layer: str) -> str:
        """The module of a layer. A layer of another process's part of a pipeline has the name of a module."""
        for prefix, part in self._subject.parts().items():
            if layer.startswith(prefix):
                return modules_of(part, [layer.removeprefix(prefix)])[0]
        return layer.partition(".")[2]

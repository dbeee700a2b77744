"""Columns of a memory plan, and the bytes of tensors that are on torch's meta device."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from nemo_lowprec.chart.options import Options
from nemo_lowprec.comm.planned import Message
from nemo_lowprec.engine import state_formats
from nemo_lowprec.optim.storage import zeros
from nemo_lowprec.report.plan.tracing import Activations, Phases
from nemo_lowprec.report.tensor_storage import as_stored, format_of

When = Literal["kept", "after forward", "after backward", "at most"]
OF_CHART: dict[str, When] = {
    "Weight": "kept", "Master weight": "kept", "Weight gradient": "after backward", "Optimizer states": "kept"
}  # fmt: skip


ADAM = ("exp_avg", "exp_avg_sq")


@dataclass
class PlannedColumn:
    """One column, which adds up what a process (the one with the largest shards) holds.

    Attributes:
        name: as in the chart, or a name of tensors that no column of the chart names.
        when: ``kept`` for all of training, there ``after forward`` until backward, or ``after backward`` until the
            step, or ``at most`` at a time.
        parts: bytes by the part of ``report.parts``; ``all`` for tensors of no part.
        found: formats of the tensors that were added.
    """

    name: str
    when: When
    parts: Counter[str] = field(default_factory=Counter)
    found: set[str] = field(default_factory=set)

    @property
    def bytes(self) -> int:
        """Of all parts."""
        return self.parts.total()

    @property
    def formats(self) -> str:
        """``+`` between several, ``–`` for nothing."""
        return "+".join(sorted(self.found)) or "–"

    def add(self, part: str, tensor: Tensor | None) -> None:
        """Add the storage of a tensor."""
        if tensor is not None and tensor.numel():
            stored = as_stored(tensor)
            self.found.add(stored.format)
            self.parts[part] += stored.bytes

    def add_bytes(self, part: str, dtype: torch.dtype, size: int) -> None:
        """Add ``size`` bytes of a dtype."""
        if size:
            self.found.add(format_of(dtype))
            self.parts[part] += size

    def add_states(
        self, part: str, param: Tensor, shard: Tensor, options: Options, moments: tuple[str, ...] = ADAM
    ) -> None:
        """Add the ``moments`` of ``param``, of which this process has ``shard``."""
        formats = state_formats(options)
        for name in moments:
            self.add(part, zeros(shard, name, formats.of(name, param)))


def columns_of_chart() -> tuple[PlannedColumn, ...]:
    """Empty columns Weight, Master weight, Weight gradient and Optimizer states."""
    return tuple(PlannedColumn(name, when) for name, when in OF_CHART.items())


@dataclass
class PlannedProcess:
    """What one process holds and sends in a step.

    Attributes:
        columns: all but activations, and what is beside them.
        messages: by Megatron-core's kind of parallelism; under an empty name with other strategies.
        beside: bytes of the columns ``at most``.
        padding: elements that pad the shards, over the model's parameters.
        stage: the pipeline stage; empty without a pipeline.
        activations: of all micro-batches under way, or why they are not planned.
    """

    columns: list[PlannedColumn]
    messages: dict[str, list[Message]]
    beside: Phases
    padding: float = 0.0
    stage: str = ""
    activations: Activations | str = ""

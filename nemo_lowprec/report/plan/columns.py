"""Columns of a memory plan, and the bytes of tensors that are on torch's meta device."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from nemo_lowprec.chart import PrecisionLevel
from nemo_lowprec.optim.storage import StateFormats, zeros
from nemo_lowprec.report.parts import STATES
from nemo_lowprec.report.tensor_storage import as_stored, format_of

When = Literal["kept", "after forward", "after backward", "at most"]
KEPT: When = "kept"
AFTER_FORWARD: When = "after forward"
AFTER_BACKWARD: When = "after backward"
AT_MOST: When = "at most"
OF_CHART = ("Weight", "Master weight", "Weight gradient", "Optimizer states")


@dataclass
class PlannedColumn:
    """One column, which adds up what a process (the one with the largest shards) holds.

    Attributes:
        name: as in the chart, or a name of tensors that no column of the chart names.
        when: ``kept`` for all of training, there ``after forward`` until backward, or ``after backward`` until the
            step, or ``at most`` at a time.
        parts: bytes by the name of a ``ModelPart``; ``all`` for tensors of no part.
        found: formats of the tensors that were added.
    """

    name: str
    when: When
    parts: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    found: set[str] = field(default_factory=set)

    @property
    def bytes(self) -> int:
        """Of all parts."""
        return sum(self.parts.values())

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

    def add_states(self, part: str, param: Tensor, shard: Tensor, level: PrecisionLevel) -> None:
        """Add Adam's moments of ``param``, of which this process has ``shard``."""
        formats = StateFormats(*level.optimizer_states, vectors=level.vectors is None)  # type: ignore[arg-type]
        for name in STATES:
            self.add(part, zeros(shard, formats.of(name, param)))


def columns_of_chart() -> tuple[PlannedColumn, PlannedColumn, PlannedColumn, PlannedColumn]:
    """Empty columns Weight, Master weight, Weight gradient and Optimizer states."""
    weights, masters, gradients, states = OF_CHART
    return (
        PlannedColumn(weights, KEPT), PlannedColumn(masters, KEPT), PlannedColumn(gradients, AFTER_BACKWARD),
        PlannedColumn(states, KEPT),
    )  # fmt: skip


@dataclass(frozen=True)
class Beside:
    """Bytes of the columns ``at most`` that are no activations, by the phase of a micro-batch.

    Attributes:
        in_blocks: in forward, until the last block is done.
        after_blocks: from then until the loss.
        backward: in backward.
    """

    in_blocks: int = 0
    after_blocks: int = 0
    backward: int = 0

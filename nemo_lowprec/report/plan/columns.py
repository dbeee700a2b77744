"""Columns of a memory plan, and the bytes of tensors that are on torch's meta device."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from nemo_lowprec.report.tensor_storage import as_stored, format_of

__all__ = ["AFTER_BACKWARD", "AFTER_FORWARD", "AT_MOST", "KEPT", "Beside", "Holdings", "PlannedColumn"]

When = Literal["kept", "after forward", "after backward", "at most"]
KEPT: When = "kept"
AFTER_FORWARD: When = "after forward"
AFTER_BACKWARD: When = "after backward"
AT_MOST: When = "at most"


@dataclass(frozen=True)
class PlannedColumn:
    """One column.

    Attributes:
        name: as in the chart, or what is there beside.
        when: ``kept`` for all of training, there ``after forward`` until backward, or ``after backward`` until the
            step, or ``at most`` at a time.
        formats: of what is stored, ``+`` between several, ``–`` for nothing.
        parts: bytes of each process (of the largest, where shards differ) for ``converted``, ``rest`` and ``vectors``;
            ``all`` for what belongs to no part.
    """

    name: str
    when: When
    formats: str
    parts: Mapping[str, int]

    @property
    def bytes(self) -> int:
        """Of all parts."""
        return sum(self.parts.values())


@dataclass
class Holdings:
    """Adds up what one column holds.

    Attributes:
        parts: bytes by part.
        formats: of what was added.
    """

    parts: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    formats: set[str] = field(default_factory=set)

    def add(self, part: str, tensor: Tensor | None) -> None:
        """Add a tensor with all that it stores."""
        if tensor is None or not tensor.numel():
            return
        stored = as_stored(tensor)
        self.formats.add(stored.format)
        self.parts[part] += stored.bytes

    def add_bytes(self, part: str, dtype: torch.dtype, size: int) -> None:
        """Add so many bytes of a dtype."""
        if size:
            self.formats.add(format_of(dtype))
            self.parts[part] += size

    def column(self, name: str, when: When) -> PlannedColumn:
        """What was added."""
        return PlannedColumn(name, when, "+".join(sorted(self.formats)) or "–", dict(self.parts))


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

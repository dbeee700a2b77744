"""What the converted layers of a block do on the host before they run, in the place of a replayed pass."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from nemo_lowprec.compute.gemm_plan import GemmPlan
from nemo_lowprec.compute.producers import Reader


class Layers:
    """The converted layers of a block.

    Args:
        plans: of the layers.
        readers: of the producers in the block (``producers.py``).
    """

    def __init__(self, plans: list[GemmPlan], readers: list[Reader]) -> None:
        self._readers, self._plans = readers, plans
        self._weights = [plan.weight for plan in plans if plan.weight is not None]
        slots = [operand.slot for plan in plans for operand in plan.operands.values()]
        self._slots = [slot for slot in slots if slot is not None]

    def follow(self) -> None:
        """Measure weights that were written, and make their quantized forms anew."""
        for state in self._weights:
            weight = state.weight
            if weight is not None:
                state.follow(weight, True)
                state.refresh()

    def are_warm(self) -> bool:
        """Whether every operand has a scale from the steps before."""
        return not any([slot.cold for slot in self._slots])

    def reads(self) -> list[Any]:
        """Objects with which the layers compute, beside their arguments and their weights."""
        kept = [state.in_place for state in self._weights]
        return [slot.scale for slot in self._slots] + kept + [plan.group for plan in self._plans]

    def beside(self) -> list[list[Any]]:
        """The weights whose gradients lie in one memory: those of each group (``compute/group.py``)."""
        groups = {id(plan.group): plan.group for plan in self._plans if plan.group is not None}
        return [[plan.weight.weight for plan in group.plans] for group in groups.values()]

    @contextmanager
    def capturing(self, block: nn.Module) -> Iterator[None]:
        """Context of a capture of ``block``: the layers read only those kept weights that are made anew in place."""
        own = {id(param) for param in block.parameters()}
        behind = [plan for plan in self._plans if plan.read_by is not None and id(plan.read_by.weight) not in own]
        norms = [plan.read_by for plan in behind]
        for plan in behind:  # a norm outside of the block reads a copy of the block's result
            plan.read_by = None
        for reader in self._readers:  # a layer outside of the block reads a copy of what the block returns
            reader.keep_to(self._slots)
        tables = {id(state.table): state.table for state in self._weights if state.table is not None}
        for table in tables.values():
            table.capturing = True
        try:
            yield
        finally:
            for plan, norm in zip(behind, norms, strict=True):
                plan.read_by = norm
            for table in tables.values():
                table.capturing = False

"""Finds the converted layers that the first training step does not call, though it may read their weights."""

from __future__ import annotations

from nemo_lowprec.compute.gemm_plan import GemmPlan
from nemo_lowprec.compute.speed_filter import Calls


class FirstStep:
    """Watches the layers of ``unread.doubtful`` in the first training step.

    Args:
        layers: the class of the module that holds the layer, by the layer's name.
        plans: of all layers, by their names.
    """

    def __init__(self, layers: dict[str, str], plans: dict[str, GemmPlan]) -> None:
        self._layers, self._calls = layers, Calls()
        self._plans = [plans[name] for name in layers]

    def watch(self) -> None:
        """Note the calls of the layers from now on, unless ``convert="auto"`` already notes the calls of all layers."""
        for plan in self._plans:
            plan.calls = plan.calls or self._calls

    def end(self) -> dict[str, str]:
        """The layers that were not called, and the class that holds each of them; no call is noted from now on."""
        called = set()
        for plan in self._plans:
            if plan.calls is not None:
                plan.calls.close()
                called |= {call.name for group, _ in plan.calls.groups for call in group}
            plan.calls = None if plan.calls is self._calls else plan.calls
        return {name: holder for name, holder in self._layers.items() if name not in called}

"""Expected time of a step: what was measured of one level, with another level's linear layers and optimizer in it.

The times of linear layers are those of ``gemm_times.py``, measured on an H200 and an H100. A step at a level takes the
times of its converted layers, its optimizer's time by the bytes that the optimizer moves, and the rest: attention,
elementwise kernels, the head, what the host adds. The rest is measured, once of the plain model in BF16 for the levels
with half GEMMs, and once of one level with FP8 GEMMs for all of these, which fuse the quantization of operands into
norms and activations, and choose attention kernels.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass

import torch

from nemo_lowprec.chart.options import Options
from nemo_lowprec.chart.recipe import Recipe
from nemo_lowprec.compute import choose_backend
from nemo_lowprec.compute.gemm_times import STORED, GemmTimes, stored_form
from nemo_lowprec.compute.speed_filter import HALF, LOW, choose, costs
from nemo_lowprec.report.advice.passes import Seen
from nemo_lowprec.report.plan.plan import Plan

_KEPT = ("Master weight", "Optimizer states")  # read and written in a step


@dataclass(frozen=True)
class Rest:
    """The time of a step, in µs, outside the linear layers and the optimizer.

    Attributes:
        half: of levels with half GEMMs.
        fp8: of levels with FP8 GEMMs; that of ``half`` where none was measured.
    """

    half: float
    fp8: float


class StepTimes:
    """Times of a step's parts on one GPU, µs.

    Args:
        times: of the GPU.
        seen: the calls of the model's linear layers.
        device: runs the GEMMs.
    """

    def __init__(self, times: GemmTimes, seen: Seen, device: torch.device) -> None:
        self._times, self._seen, self._device = times, seen, device

    def rest(self, plain: float, step: float = 0.0, options: Options | None = None, plan: Plan | None = None) -> Rest:
        """The rest, from measured times.

        Args:
            plain: forward and backward of the model with BF16 weights.
            step: at a level with FP8 GEMMs, with its optimizer.
            options, plan: of that level; None where ``plain`` alone was measured.
        """
        half = plain - self._linear("half", None)
        if options is None or plan is None:
            return Rest(half, half)
        return Rest(half, step - self.linear(options) - self.optimizer(plan))

    def step(self, options: Options, plan: Plan, rest: Rest, kept_back: Container[str] = ()) -> float:
        """A step at a level, with ``kept_back`` in half precision."""
        other = rest.half if options.recipe is None else rest.fp8
        return other + self.linear(options, kept_back) + self.optimizer(plan)

    def linear(self, options: Options, kept_back: Container[str] = ()) -> float:
        """The time of the layers that a level may convert: in FP8 a layer that gains and is not in ``kept_back``."""
        return self._linear(stored_form(options.level, options.recipe), options, kept_back)

    def optimizer(self, plan: Plan) -> float:
        """Of an optimizer that moves each byte once: masters and states in and out, gradients in, weights out."""
        kept = sum(plan.column(name).bytes for name in _KEPT)
        weights = plan.column("Weight").bytes
        reads_weights = 0 if plan.column("Master weight").bytes else weights
        moved = 2 * kept + weights + reads_weights + plan.column("Weight gradient").bytes
        return moved / self._times.cast[1]

    def _linear(self, stored: str, options: Options | None, kept_back: Container[str] = ()) -> float:
        names, calls = self._seen.layers, self._seen.calls
        if options is None or options.recipe is None:
            return float(costs(calls, names, self._times, Recipe("current"), STORED[stored])[:, HALF].sum())
        backend = choose_backend(options.backend, options.recipe, self._device)
        joins = backend.joins and options.recipe.scaling == "delayed" and stored != "fp8"
        cost = costs(calls, names, self._times, options.recipe, STORED[stored], joins=joins)
        left = choose(cost, names, self._times, options.level.autocast, 0).left if options.layers.is_auto else {}
        return sum(
            row[HALF if name in left or name in kept_back else LOW]
            for name, row in zip(names, cost.tolist(), strict=True)
        )

"""How one linear layer computes: the backend, the dtypes and the operands of its three GEMMs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from nemo_lowprec.chart.recipe import Recipe
from nemo_lowprec.compat.autograd import is_legacy_batched, is_tracing, outside_transforms
from nemo_lowprec.compute.backends.base import Backend
from nemo_lowprec.compute.operands import Operand
from nemo_lowprec.compute.shared_input import SharedInput
from nemo_lowprec.compute.weight_state import WeightState
from nemo_lowprec.observers import NOBODY, Observers
from nemo_lowprec.tensors import QuantizedTensor


@dataclass
class GemmPlan:
    """How a layer computes.

    Attributes:
        backend: runs the GEMMs; None for ``HalfLinear``, which torch computes.
        half: dtype of inputs and outputs, and of GEMMs that are not in FP8.
        recipe: None for a layer whose GEMMs all run in half precision.
        operands: the layer's ``input``, ``weight`` and ``grad_output``; none without a recipe.
        inputs: the ``SharedInput`` of all layers of the model that have a recipe.
        weight: says when the weight was written, and keeps the quantized weight; None: it is quantized at each use.
        keeps_weight: whether forward makes and saves the weight's columnwise operand for backward. False for a weight
            that is gathered again in backward: forward then saves nothing of it, but for an input without elements.
            False, too, where operands are made again to save memory.
        name: the layer's name in the model.
        observers: of the engine that converted the layer; each operand is announced to them when it is ready.
        fp8: which of (fprop, dgrad, wgrad) run in FP8.
        any_fp8: whether one of the three does.
        ignores_autocast: whether the passes give the same results under autocast.
        by_torch: whether the GEMMs are those of an ``nn.Linear``: of a layer that ``convert="auto"`` has left.
        calls: notes the layer's calls while ``convert="auto"`` has not decided; None for nobody.
        entry: the layer's ``GraphEntry``; None where the layer breaks compiled graphs.
        ends_branch: whether the layer ends a branch of a residual block (``residual.py``).
        read_by: the ``NormCall`` of the norm that reads the sum behind such a branch; None for an unknown one.
        group: the ``LayerGroup`` of the layer; None for a layer that computes by itself.
        is_flat: whether calls of the layer may take few steps on the host (``flat_linear.py``).
        grad_reader: the layer's ``GradReader``, once there is one.
    """

    backend: Backend
    half: torch.dtype
    recipe: Recipe | None = None
    operands: dict[str, Operand] = field(default_factory=dict)
    inputs: SharedInput = field(default_factory=SharedInput)
    weight: WeightState | None = None
    keeps_weight: bool = True
    name: str = ""
    observers: Observers = NOBODY
    fp8: tuple[bool, bool, bool] = field(init=False)
    any_fp8: bool = field(init=False)
    ignores_autocast: bool = field(init=False)
    by_torch: bool = False
    calls: Any = field(default=None, repr=False, compare=False)
    entry: Any = field(init=False, default=None, repr=False, compare=False)
    ends_branch: bool = field(init=False, default=False, repr=False, compare=False)
    read_by: Any = field(init=False, default=None, repr=False, compare=False)
    group: Any = field(init=False, default=None, repr=False, compare=False)
    is_flat: bool = field(init=False, default=False, repr=False, compare=False)
    grad_reader: Any = field(init=False, default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        self.fp8 = (False, False, False)
        if self.recipe is not None:
            fprop, dgrad, wgrad = self.recipe.override_linear_precision
            self.fp8 = (not fprop, not dgrad, not wgrad)
        self.any_fp8 = any(self.fp8)
        self.ignores_autocast = all(self.fp8) and self.backend.ignores_autocast

    def in_half(self, kind: str, values: Tensor) -> Tensor:
        """The operand ``kind`` [rows, features] of a GEMM in half precision."""
        if isinstance(values, QuantizedTensor) and not torch.is_grad_enabled() and not is_tracing():
            half = values.dequantize(self.half)  # which has no derivative, and is not traced
        else:
            half = values.to(self.half)
        if self.observers.quantized:
            self.announce(kind, values, half)
        return half

    def announce(self, kind: str, values: Tensor, operand: Any) -> None:
        """Tell ``observers`` that an operand is ready (see ``Observer.quantized``); called where there are any."""
        if is_tracing() or is_legacy_batched(values):
            return
        values, operand = _outside_transforms(values), _outside_transforms(operand)
        with torch.no_grad():
            for see in self.observers.quantized:
                see(self.name, kind, values, operand, self.backend)


def _outside_transforms(operand: Any) -> Any:
    operand = outside_transforms(operand)
    return operand.detach() if isinstance(operand, Tensor) else operand

"""Scales of weights, one per tensor: each is computed from the weight's present amax, also under delayed scaling.

The amax of a weight is known when the optimizer has stepped. A fused step stores the amax on the weight
(``amax_of_step``); one pass measures the other weights. A weight that something else has written (``load_state_dict``,
``copy_``, a callback) is measured when its layer runs next, and the histories of the layer's input and output
gradient start anew, since the old histories belong to the old weight.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from nemo_lowprec.compute.weight_state import WeightState, WeightStates
from nemo_lowprec.formats import AmaxSlot, compute_amax, compute_scale
from nemo_lowprec.formats.floats import FloatFormat
from nemo_lowprec.tensors import Fp8Gathered, Fp8Weight, stored_data
from nemo_lowprec.tensors.dtensor import is_sharded


class WeightScale(WeightState):
    """Scale of one weight, the ``slot`` of its layer's weight operand (compare ``AmaxSlot``).

    A weight that is stored in FP8 has its own scale.

    Attributes:
        fmt: format of the quantized weight.
        margin: the scale is divided by 2**margin.
        scale: shape [1], FP32, view into the table.
        amax: shape [1], FP32, view into the table: the weight's amax when it was measured.
        beside: the ``WeightScale``s of all weights of one ``LayerGroup``, this one included: their scales are equal, of
            the largest of their amaxes. Empty for a weight without a group.
    """

    __slots__ = ("amax", "beside", "fmt", "margin", "scale")

    cold = False

    def __init__(
        self, layer: nn.Module, name: str, histories: Sequence[AmaxSlot], table: WeightScales,
    ) -> None:  # fmt: skip
        super().__init__(layer, name, histories, table)
        self.fmt, self.margin = table.fmt, table.margin
        self.beside: tuple[WeightScale, ...] = ()
        self.scale: Tensor
        self.amax: Tensor

    def current_scale(self, _: Tensor) -> Tensor:
        """The scale, FP32 [1]."""
        return self.scale

    def _scale(self) -> Tensor | None:
        return self.scale

    @torch.no_grad()
    def _measure(self, weight: Tensor, state: tuple[int, ...]) -> None:
        super()._measure(weight, state)
        if isinstance(weight, Fp8Weight):
            return
        others = [one for one in self.beside if one is not self]
        found = [compute_amax(stored_data(weight)).reshape(1)]
        for one in others:
            other = one.weight
            there = other is not None and not is_sharded(other)
            found.append(compute_amax(stored_data(other)).reshape(1) if there else one.amax)  # type: ignore[arg-type]
        amax = torch.cat(found).amax().reshape(1) if others else found[0]
        for one in self.beside or (self,):
            one.scale.copy_(compute_scale(amax, self.fmt.max, self.margin))
            one.amax.copy_(amax)
        for one in others:
            one._rescaled()


class WeightScales(WeightStates):
    """The scales of all weights of one model, in one table.

    Args:
        fmt: format of quantized weights.
        margin: scales are divided by 2**margin.

    Attributes:
        reduce_amax: replaces amaxes by their maxima over the processes that hold shards of a model, in place; None
            where each process holds whole weights.
    """

    def __init__(self, fmt: FloatFormat, margin: int) -> None:
        super().__init__()
        self.fmt, self.margin = fmt, margin
        self._largest: Tensor | None = None  # by weight: the first of those that have one scale
        self.reduce_amax: Callable[[Tensor], None] | None = None
        self._gathered_as: torch.dtype | None = None
        self._allocate(torch.device("cpu"))

    def _new(self, layer: nn.Module, name: str, histories: Sequence[AmaxSlot]) -> WeightScale:
        return WeightScale(layer, name, histories, self)

    def settle(self, device: torch.device, gathered_as: torch.dtype | None = None) -> None:
        """Move the table to ``device``, the model's; every weight is measured anew. See ``AmaxState.settle``."""
        self._allocate(device)
        self._gathered_as = gathered_as
        super().settle(device, gathered_as)

    def _allocate(self, device: torch.device) -> None:
        n, self._largest = len(self.states), None
        self.scale, self.amax = (
            torch.ones(n, device=device, dtype=torch.float32),
            torch.zeros(n, device=device, dtype=torch.float32),
        )
        for i, one in enumerate(self.states.values()):
            one.scale, one.amax = self.scale[i : i + 1], self.amax[i : i + 1]

    def join(self, states: Sequence[WeightScale]) -> None:
        """Give these weights one scale from now on."""
        scale = torch.cat([one.scale for one in states]).amin()
        amax = torch.cat([one.amax for one in states]).amax()
        for one in states:
            one.beside = tuple(states)
            one.scale.copy_(scale)
            one.amax.copy_(amax)
            one._rescaled()
        self._largest = None

    def part(self, states: Sequence[WeightScale]) -> None:
        """Give each of these weights a scale of its own again, when its layer runs next."""
        for one in states:
            one.beside = ()
            one.forget()
        self._largest = None

    def _of_joined(self, amax: Tensor) -> Tensor:
        """``amax``, of weights with one scale the largest one."""
        if not any(one.beside for one in self.states.values()):
            return amax
        if self._largest is None:
            at = {id(one): i for i, one in enumerate(self.states.values())}
            first = [at.get(id(one.beside[0]), i) if one.beside else i for i, one in enumerate(self.states.values())]
            self._largest = torch.tensor(first, device=amax.device, dtype=torch.int64)
        return torch.zeros_like(amax).scatter_reduce_(0, self._largest, amax, "amax")[self._largest]

    @torch.no_grad()
    def renew(self) -> None:
        """After a step: compute the scales of all weights from their present values. The host does not wait."""
        weights = self._note_all()
        if not weights:
            return
        by_dtype: dict[torch.dtype, list[tuple[int, Tensor]]] = {}
        norms = [torch.zeros((), device=self.amax.device, dtype=torch.float32)] * len(weights)
        for i, (local, left) in enumerate(weights):
            if left is not None:
                norms[i] = left
            elif local is not None and not isinstance(local, Fp8Weight | Fp8Gathered):  # which have their own scales
                data = stored_data(local)
                if data.numel():
                    by_dtype.setdefault(data.dtype, []).append((i, data))
        for found in by_dtype.values():
            for (i, _), norm in zip(found, torch._foreach_norm([data for _, data in found], math.inf), strict=True):
                norms[i] = norm
        if len({norm.dtype for norm in norms}) > 1:
            norms = [norm.float() for norm in norms]
        amax = torch.stack(norms).float()
        if self.reduce_amax is not None:
            self.reduce_amax(amax)
        if self._gathered_as is not None:
            amax = amax.to(self._gathered_as).float()
        amax = self._of_joined(amax)
        self.amax.copy_(amax)
        self.scale.copy_(compute_scale(amax, self.fmt.max, self.margin))

    def nonfinite(self) -> Tensor:
        """Whether any weight was not finite when it was measured, as a tensor on the device."""
        return (~torch.isfinite(self.amax)).any()

"""Scales of weights under delayed scaling: each is computed from the weight's present amax, not from a history.

The amax of a weight is known when the optimizer has stepped. A fused step stores the amax on the weight
(``amax_of_step``); one pass measures the other weights. A weight that something else has written (``load_state_dict``,
``copy_``, a callback) is measured when its layer runs next, and the layer's input and output gradient start new
histories, since the old histories belong to the old weight.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn

from nemo_lowprec.formats import AmaxSlot, compute_amax, compute_scale
from nemo_lowprec.formats.floats import FloatFormat
from nemo_lowprec.tensors import Fp8Gathered, Fp8Weight, stored_data
from nemo_lowprec.tensors.dtensor import local_shard


class WeightScale:
    """Scale of one weight, the ``slot`` of its layer's weight operand (compare ``AmaxSlot``).

    Attributes:
        layer: the module that holds the weight, held weakly; None once the module is gone.
        name: the weight's name in ``layer``.
        fmt: format of the quantized weight.
        margin: the scale is divided by 2**margin.
        scale: shape [1], FP32, view into the table.
        amax: shape [1], FP32, view into the table: the weight's amax when it was measured.
        histories: the columns of the layer's other operands.
        gathered: whether the weight is gathered from shards for each computation. Its address and version then change
            at every gathering, and only ``WeightScales.forget`` says that it was written.
    """

    __slots__ = ("_layer", "_left", "_measured", "amax", "fmt", "gathered", "histories", "margin", "name", "scale")

    cold = False

    def __init__(self, layer: nn.Module, name: str, fmt: FloatFormat, margin: int, histories: list[AmaxSlot]) -> None:
        self.layer, self.name, self.fmt, self.margin, self.histories = layer, name, fmt, margin, histories
        self.gathered = False
        self._measured: Any = None
        self._left: Any = None
        self.scale: Tensor
        self.amax: Tensor

    def __getstate__(self) -> tuple[None, dict[str, Any]]:
        # The weights of a copied model have the same values: measured anew, without new histories.
        state = {name: getattr(self, name) for name in self.__slots__ if hasattr(self, name)}
        del state["_layer"]
        return None, {**state, "layer": self.layer, "_measured": None, "_left": None}

    @property
    def layer(self) -> nn.Module | None:
        return self._layer() if self._layer is not None else None

    @layer.setter
    def layer(self, layer: nn.Module | None) -> None:
        self._layer = ref(layer) if layer is not None else None

    @property
    def weight(self) -> Tensor | None:
        """The layer's weight; None where it is computed anew for each forward (pruned, parametrized)."""
        return None if self.layer is None else self.layer._parameters.get(self.name)

    def current_scale(self, _: Tensor) -> Tensor:
        """The scale, FP32 [1]."""
        return self.scale

    def follow(self, weight: Tensor, training: bool) -> None:
        """Measure ``weight`` [out_features, in_features] unless the scale was computed from its present values.

        The first evaluation after training measures again: a weight can be written without a trace (``.data``). A
        weight that is stored in FP8 has its own scale.
        """
        state = (training,) if self.gathered else (training, *_state_of(weight))
        if state != self._measured:  # one comparison, in every forward of every layer
            self._measure(weight, state)

    @torch.no_grad()
    def _measure(self, weight: Tensor, state: tuple[int, ...]) -> None:
        if self._measured is not None and state[1:] != self._measured[1:] and self.weight is not None:
            self.restart()
        self._measured = state
        _take_amax_of_step(weight)
        if not isinstance(weight, Fp8Weight):
            amax = compute_amax(stored_data(weight)).reshape(1)
            self.scale.copy_(compute_scale(amax, self.fmt.max, self.margin))
            self.amax.copy_(amax)

    def note(self, weight: Tensor) -> None:
        """Note that the scale was computed from the present values of ``weight``."""
        self._measured = (True,) if self.gathered else (True, *_state_of(weight))

    def restart(self) -> None:
        """Start new histories for the layer's other operands."""
        for slot in self.histories:
            slot.restart()

    def forget(self) -> None:
        """Measure the weight when its layer runs next. The histories of the layer's other operands stay."""
        self._measured = None
        if self.weight is not None:
            _take_amax_of_step(local_shard(self.weight))

    def leave(self) -> None:
        """Note the state of the weight when its layer is reverted."""
        self._measured, self._left = None, self._state()

    def come_back(self, layer: nn.Module, histories: list[AmaxSlot]) -> None:
        """Follow a layer that is converted again. Its histories stay where the weight was not written in between."""
        self.layer, self.histories = layer, histories
        if self._left is None or self._left != self._state():
            self.restart()
        self._measured = self._left = None

    def _state(self) -> tuple[int, ...] | None:
        weight = self.weight
        return None if weight is None or weight.is_meta else _state_of(weight)


def _state_of(weight: Tensor) -> tuple[int, ...]:
    """Versions and address of ``weight`` and of its storage, which change when the weight is written."""
    data = stored_data(local_shard(weight))
    version = -1 if weight.is_inference() else weight._version
    if data is weight:
        return version, data.data_ptr()
    return version, -1 if data.is_inference() else data._version, data.data_ptr()


def _take_amax_of_step(local: Tensor) -> Tensor | None:
    """The weight's ``amax_of_step`` (FP32 scalar), removed from the weight; None where no kernel has left an amax."""
    left: Tensor | None = local.__dict__.pop("amax_of_step", None)
    return left


class WeightScales:
    """The scales of all weights of one model, in one table.

    Args:
        fmt: format of quantized weights.
        margin: scales are divided by 2**margin.

    Attributes:
        reduce_amax: replaces amaxes by their maxima over the processes that hold shards of a model, in place; None
            where each process holds whole weights.
    """

    def __init__(self, fmt: FloatFormat, margin: int) -> None:
        self.fmt, self.margin = fmt, margin
        self.reduce_amax: Callable[[Tensor], None] | None = None
        self.scales: dict[str, WeightScale] = {}
        self._gathered_as: torch.dtype | None = None
        self._allocate(torch.device("cpu"))

    def add(self, key: str, layer: nn.Module, name: str, histories: list[AmaxSlot]) -> WeightScale:
        """The scale of the weight ``name`` of ``layer``; a layer that is converted again gets its earlier one."""
        if key in self.scales:
            self.scales[key].come_back(layer, histories)
        else:
            self.scales[key] = WeightScale(layer, name, self.fmt, self.margin, histories)
        return self.scales[key]

    def settle(self, device: torch.device, gathered_as: torch.dtype | None = None) -> None:
        """Move the table to ``device``, the model's; every weight is measured anew. See ``AmaxState.settle``."""
        self._allocate(device)
        self._gathered_as = gathered_as
        for scale in self.scales.values():
            scale.gathered = gathered_as is not None
        self.forget()

    def _allocate(self, device: torch.device) -> None:
        n = len(self.scales)
        self.scale, self.amax = torch.ones(n, device=device), torch.zeros(n, device=device)
        for i, one in enumerate(self.scales.values()):
            one.scale, one.amax = self.scale[i : i + 1], self.amax[i : i + 1]

    def forget(self) -> None:
        """Measure every weight when its layer runs next."""
        for scale in self.scales.values():
            scale.forget()

    def restart(self) -> None:
        """Measure every weight when its layer runs next, and start all histories anew."""
        for scale in self.scales.values():
            scale.forget()
            scale.restart()

    def leave(self) -> None:
        """Note the states of all weights when the model is reverted."""
        for scale in self.scales.values():
            scale.leave()

    @torch.no_grad()
    def renew(self) -> None:
        """After a step: compute the scales of all weights from their present values. The host does not wait."""
        if not self.scales:
            return
        by_dtype: dict[torch.dtype, list[tuple[int, Tensor]]] = {}
        norms = [torch.zeros((), device=self.amax.device)] * len(self.scales)
        for i, scale in enumerate(self.scales.values()):
            weight = scale.weight
            if weight is None:  # a parametrization computes the weight for each forward
                scale.forget()
                continue
            scale.note(weight)
            local = local_shard(weight)
            data = stored_data(local)
            left = _take_amax_of_step(local)
            if left is not None:
                norms[i] = left
            elif data.numel() and not isinstance(local, Fp8Weight | Fp8Gathered):  # which have their own scales
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
        self.amax.copy_(amax)
        self.scale.copy_(compute_scale(amax, self.fmt.max, self.margin))

    def nonfinite(self) -> Tensor:
        """Whether any weight was not finite when it was measured, as a tensor on the device."""
        return (~torch.isfinite(self.amax)).any()

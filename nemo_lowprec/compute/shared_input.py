"""What layers share that read the same tensor: a block's q, k and v, its gate and up projections.

They quantize it once: with delayed scaling such layers have seen the same amaxes, so their scales are equal and the
first one's result is everyone's. It is kept for as long as the tensor lives that it was made from.

And they add its gradient up in their GEMMs. To autograd the others read not the tensor but a handle that the first
one gives out, so that the first one's backward runs last; it hands the sum on.
"""

from __future__ import annotations

from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor

from nemo_lowprec.compute.backends.base import Backend
from nemo_lowprec.compute.operands import Operand
from nemo_lowprec.formats import DelayedScaling

__all__ = ["InputGradient", "SharedInput"]


class InputGradient:
    """The gradient of a tensor that several layers read, as far as it has been added up."""

    def __init__(self) -> None:
        self._sum: Tensor | None = None
        self._pass = -1

    def take(self) -> Tensor | None:
        """The sum of this backward pass so far, which becomes the caller's."""
        total, self._sum = self._sum, None
        # One that is left from a pass which did not go on to the first layer is no part of this one.
        return total if self._pass == torch._C._current_graph_task_id() else None

    def put(self, total: Tensor) -> None:
        """Leave the sum to the next layer."""
        self._sum, self._pass = total, torch._C._current_graph_task_id()


class _Latest:
    """A value that belongs to a tensor, for as long as that lives and does not change."""

    def __init__(self) -> None:
        self._forget()

    def _forget(self, _: Any = None) -> None:
        self._source: Any = None
        self._version = -1
        self._value: Any = None

    def get(self, source: Tensor) -> Any:
        there = self._source is not None and self._source() is source and self._version == source._version
        return self._value if there else None

    def set(self, source: Tensor, value: Any) -> None:
        self._source, self._version, self._value = ref(source, self._forget), source._version, value


class _Quantized(NamedTuple):
    """The data, whose they are, and the orientations that they have."""

    key: tuple[Any, ...]
    operand: Operand
    data: Any
    rowwise: bool
    columnwise: bool


class SharedInput:
    """The quantized input, and its gradient, of the layer that ran last.

    Args:
        histories: amax histories of the model, for delayed scaling.
    """

    def __init__(self, histories: DelayedScaling | None = None) -> None:
        self._histories = histories
        self._quantized = _Latest()
        self._gradient = _Latest()

    def __deepcopy__(self, memo: dict[int, Any]) -> SharedInput:
        return SharedInput()  # of a model that no engine renews the scales of

    def __reduce__(self) -> tuple[Any, ...]:
        return SharedInput, ()

    def quantize(
        self, backend: Backend, source: Tensor, values: Tensor, operand: Operand, *,
        rowwise: bool, columnwise: bool, record: bool,
    ) -> Any:  # fmt: skip
        """Quantize ``values``, which are those of ``source``, or hand out what another layer made of it.

        Args:
            source: the tensor that the layer was called with: the same object is taken for the same values while
                its version is the same.
        """
        # Inference tensors count no versions, and a leaf that is trained may be written through ``.data``.
        if source.is_inference() or (source.is_leaf and source.requires_grad):
            return backend.quantize(values, operand, rowwise=rowwise, columnwise=columnwise, record=record)
        key = (type(backend), values.shape, values.dtype, operand.scaling, operand.fmt, operand.margin, record)
        there = self._quantized.get(source)
        if there is not None and there.key == key and there.rowwise >= rowwise and there.columnwise >= columnwise:
            first = there.operand
            if record and operand.slot is not None and first.slot is not None and self._histories is not None:
                self._histories.share(operand.slot, first.slot)
            return backend.copy_operand(there.data)
        data = backend.quantize(values, operand, rowwise=rowwise, columnwise=columnwise, record=record)
        self._quantized.set(source, _Quantized(key, operand, data, rowwise, columnwise))
        return backend.copy_operand(data)

    def gradient(self, source: Tensor) -> tuple[InputGradient, Tensor | None]:
        """Where the gradient of ``source`` is added up, and its handle, which the first layer has yet to give out."""
        found: tuple[InputGradient, Tensor | None] | None = self._gradient.get(source)
        return found or (InputGradient(), None)

    def give_out(self, source: Tensor, gradient: InputGradient, handle: Tensor) -> None:
        """Let others read ``handle`` in the place of ``source``, which is not a leaf."""
        # Nothing that the handle's graph holds may hold the handle: such a circle is never freed. A leaf is held.
        if not source.is_leaf:
            self._gradient.set(source, (gradient, handle))

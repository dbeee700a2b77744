"""One quantization for layers that read the same tensor: a block's q, k and v, its gate and up projections.

With delayed scaling such layers have seen the same amaxes, so their scales are equal and the first one's result is
everyone's. It is kept for as long as the tensor lives that it was made from.
"""

from __future__ import annotations

from typing import Any
from weakref import ref

from torch import Tensor

from nemo_lowprec.compute.backends.base import Backend
from nemo_lowprec.compute.recipe import Operand
from nemo_lowprec.formats import DelayedScaling

__all__ = ["SharedInput"]


class SharedInput:
    """The quantized input of the layer that ran last.

    Args:
        histories: amax histories of the model, for delayed scaling.
    """

    def __init__(self, histories: DelayedScaling | None = None) -> None:
        self._histories = histories
        self._forget()

    def __deepcopy__(self, memo: dict[int, Any]) -> SharedInput:
        return SharedInput()  # of a model that no engine renews the scales of

    def __reduce__(self) -> tuple[Any, ...]:
        return SharedInput, ()

    def _forget(self, _: Any = None) -> None:
        self._source: Any = None
        self._version = -1
        self._key: tuple[Any, ...] = ()
        self._operand: Operand | None = None
        self._quantized: Any = None
        self._has = (False, False)

    def quantize(
        self, backend: Backend, source: Tensor, values: Tensor, operand: Operand, *,
        rowwise: bool, columnwise: bool, record: bool,
    ) -> Any:  # fmt: skip
        """Quantize ``values``, which are those of ``source``, or hand out what another layer made of it.

        Args:
            source: the tensor that the layer was called with: the same object is taken for the same values while
                its version is the same.
        """
        if source.is_inference():  # such tensors count no versions
            return backend.quantize(values, operand, rowwise=rowwise, columnwise=columnwise, record=record)
        key = (type(backend), values.shape, values.dtype, operand.scaling, operand.fmt, operand.margin, record)
        first = self._operand
        if (
            self._source is not None and self._source() is source and self._version == source._version
            and self._key == key and first is not None
            and (not rowwise or self._has[0]) and (not columnwise or self._has[1])
        ):  # fmt: skip
            if record and operand.slot is not None and first.slot is not None and self._histories is not None:
                self._histories.share(operand.slot, first.slot)
            return backend.copy_operand(self._quantized)
        quantized = backend.quantize(values, operand, rowwise=rowwise, columnwise=columnwise, record=record)
        self._source, self._version, self._key = ref(source, self._forget), source._version, key
        self._operand, self._has, self._quantized = operand, (rowwise, columnwise), quantized
        return backend.copy_operand(quantized)

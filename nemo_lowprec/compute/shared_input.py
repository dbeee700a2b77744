"""Quantized operands that travel with a tensor: a block's q, k and v, its gate and up projections read one input.

One ``SharedInput`` belongs to all converted layers of a model. It holds two things for the tensors that were read last:
two tensors, since an adapter beside a layer reads one of its own in between.

``operand``  The tensor's values, quantized by a backend: rowwise data [rows, features], columnwise data
             [features, rows], or both, in the 8-bit format of the layers' ``input`` operand, with FP32 scales. ``rows``
             is the product of the tensor's leading dimensions, padded with zero rows to a multiple of the backend's
             ``row_multiple``. The values are quantized from the plan's half dtype.
``handle``   An empty tensor in the autograd graph, and the ``InputGradient`` that sums the tensor's gradient: [rows,
             features] in the tensor's dtype, the sum of the readers' dgrad GEMMs.

Who makes the operand: the first layer that reads the tensor (``quantize``), or the producer of the tensor that has
quantized it in its own kernel, such as a fused activation (``offer``).

Who reads the operand: every later layer with the same backend, half dtype, scaling, format and margin that needs no
orientation which the operand lacks. With delayed scaling such layers have seen the same amaxes, so their scales are
equal. The amax is recorded once, in the slot of the operand's maker; ``DelayedScaling.share`` enters it into the
histories of the other readers.

When the operand is dropped: when the tensor is freed or changed in place, when two other tensors were read since, or
when the history behind a delayed scale was ended. In the next step the tensor is quantized anew, so that each step
records its amax. Tensors that may change without a trace have no operand here:
inference tensors, parameters, and leaves that require a gradient. Every layer quantizes such tensors for itself.

What backward adds up: to autograd the later layers read the handle, not the tensor, so that the first layer's backward
runs last. Each layer adds its dgrad to the sum in its own GEMM; the first layer returns the sum as the gradient of the
tensor. This holds for a tensor with an offered operand, too.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor, nn

from nemo_lowprec.compat.autograd import current_backward
from nemo_lowprec.compute.backends.base import Backend
from nemo_lowprec.compute.operands import Operand
from nemo_lowprec.compute.producers import Reader, computed, reader_of
from nemo_lowprec.formats import DelayedScaling


class InputGradient:
    """The gradient of a tensor that several layers read: [rows, features], as far as it has been added up.

    Attributes:
        readers: the ``GemmPlan``s of the layers, in the order of their calls.
    """

    __slots__ = ("_pass", "_sum", "readers")

    def __init__(self) -> None:
        self.readers: list[Any] = []
        self._sum: Tensor | None = None
        self._pass = -1

    def take(self) -> Tensor | None:
        """The sum of this backward pass so far, which the caller may write into; None where there is none."""
        total, self._sum = self._sum, None
        # A sum left over from an earlier backward pass is discarded.
        return total if self._pass == current_backward() else None

    def put(self, total: Tensor) -> None:
        """Leave the sum to the next layer."""
        self._sum, self._pass = total, current_backward()


@lru_cache(maxsize=16)
def _nothing(device: torch.device) -> Tensor:
    return torch.empty(0, device=device, dtype=torch.float32)


def no_values(source: Tensor) -> Tensor:
    """An empty tensor on the device of ``source``, for a handle: no allocation, where one takes host time."""
    # A traced tensor has another class.
    return _nothing(source.device).detach() if source.is_cuda and type(source) is Tensor else source.new_empty(0)


class Latest:
    """A value for each of the two tensors that were asked for last, until the tensor is freed or changed in place."""

    __slots__ = ("_before", "_last")

    def __init__(self) -> None:
        # (weak reference to the tensor, its version, the value)
        self._last: tuple[Any, int, Any] | None = None
        self._before: tuple[Any, int, Any] | None = None

    def get(self, source: Tensor) -> Any:
        last = self._last
        if last is not None and last[0]() is source:
            return last[2] if last[1] == source._version else None
        before = self._before
        if before is None or before[0]() is not source or before[1] != source._version:
            return None
        self._last, self._before = before, last
        return before[2]

    def set(self, source: Tensor, value: Any) -> None:
        last = self._last
        if last is not None and last[0]() is not source:
            self._before = last
        self._last = ref(source, self._forget), source._version, value

    def _forget(self, freed: Any) -> None:
        if self._last is not None and self._last[0] is freed:
            self._last = None
        elif self._before is not None and self._before[0] is freed:
            self._before = None


class _Quantized(NamedTuple):
    """An operand that was made of a tensor.

    Attributes:
        backend: the class of the maker's backend.
        shape, dtype: of the values that were quantized.
        operand: the maker's, whose slot has recorded the amax.
        record: whether the maker trains.
        step: of the histories that have recorded the amax.
        data: the backend's quantized operand.
        rowwise, columnwise: orientations of ``data``.
        delayed: whether the scale came from a history.
        reader: of the producer that has made the operand; None where a layer has.
    """

    backend: type[Backend]
    shape: torch.Size
    dtype: torch.dtype
    operand: Operand
    record: bool
    step: int
    data: Any
    rowwise: bool
    columnwise: bool
    delayed: bool
    reader: Reader | None

    def fits(
        self, backend: Backend, values: Tensor, operand: Operand, record: bool, step: int, rowwise: bool,
        columnwise: bool,
    ) -> bool:  # fmt: skip
        """Whether a reader can use ``data``, whose amax counts in this step and whose history is still in use."""
        own = self.operand
        return (
            self.rowwise >= rowwise and self.columnwise >= columnwise
            and self.backend is type(backend) and self.shape == values.shape and self.dtype == values.dtype
            and own.scaling == operand.scaling and own.fmt == operand.fmt and own.margin == operand.margin
            and self.record == record and self.step == step and not (self.delayed and own.slot.cold)
        )  # fmt: skip


class SharedInput:
    """The quantized operand, and the gradient, of the tensor that a model's converted layers read last.

    Args:
        histories: amax histories of the model, for delayed scaling.

    Attributes:
        tag: what the layers have in common in compiled graphs (see ``graph_entry``).
        again: whether backward quantizes the output of attention again.
        parameters_stay: whether parameters of other modules than the one that runs may be read: nothing gathers them.
        see: is called in backward with the plans of layers that have read one tensor one after another.
    """

    tag: Tensor | None = None
    again: bool = False
    parameters_stay: bool = True
    see: Any = staticmethod(lambda plans: None)

    def __init__(self, histories: DelayedScaling | None = None) -> None:
        self.histories = histories
        self._quantized = Latest()
        self._gradient = Latest()

    @property
    def _step(self) -> int:
        return 0 if self.histories is None else self.histories.steps

    def __reduce__(self) -> tuple[Any, ...]:
        return SharedInput, ()  # no engine renews the scales of a copied model

    def quantize(
        self, backend: Backend, source: Tensor, values: Tensor, operand: Operand, *,
        rowwise: bool, columnwise: bool, record: bool,
    ) -> Any:  # fmt: skip
        """The quantized operand of ``source`` for one layer: the one that is there, or a new one.

        Args:
            source: the tensor that the layer was called with, [..., features].
            values: the same values in the plan's half dtype, [rows, features], padded.
            operand: the layer's ``input`` operand.
            record: whether the amax enters the operand's history.
        """
        if may_change_unseen(source):
            return backend.quantize(values, operand, rowwise=rowwise, columnwise=columnwise, record=record)
        there: _Quantized | None = self._quantized.get(source)
        reader = reader_of(source)
        if there is not None and there.reader is not None and not there.reader.knows(operand):
            there = None  # quantized for the layers at another place of the same producer
        if there is not None and there.fits(backend, values, operand, record, self._step, rowwise, columnwise):
            first = there.operand.slot
            if record and operand.slot is not None and first is not None and self.histories is not None:
                self.histories.share(operand.slot, first)
            if there.reader is not None:
                there.reader.take()
            elif reader is not None:
                reader.follow(operand)
            return backend.copy_operand(there.data)
        if reader is not None and operand.slot is not None and rowwise:
            reader.learn(self, backend, operand, values.dtype, columnwise, record)
        there_at_last = computed(source)
        values = values if there_at_last is source else there_at_last.reshape(values.shape)
        data = backend.quantize(values, operand, rowwise=rowwise, columnwise=columnwise, record=record)
        self._keep(source, backend, values.shape, values.dtype, operand, record, data, rowwise, columnwise, None)
        return backend.copy_operand(data)

    def is_new(self, source: Tensor) -> bool:
        """Whether there is no operand of ``source`` yet, and no producer that asks who reads ``source``."""
        return reader_of(source) is None and self._quantized.get(source) is None

    def offer(
        self, backend: Backend, source: Tensor, data: Any, operand: Operand, *, shape: tuple[int, int],
        dtype: torch.dtype, rowwise: bool, columnwise: bool, record: bool, reader: Reader | None = None,
    ) -> None:  # fmt: skip
        """Hand over the quantized operand of a tensor that the caller has produced; its readers then quantize nothing.

        The producer quantizes with the scale of ``operand`` and, where ``record``, has entered the amax into
        ``operand.slot``.

        Args:
            backend: the readers' ``gemm_plan.backend``.
            source: the tensor object that the readers will be called with, [..., features]; for a producer that is an
                ``autograd.Function``, the result of ``apply``.
            data: a quantized operand as ``backend.quantize`` returns it; the readers own it from now on.
            operand: the ``input`` operand of one of the readers.
            shape: (rows, features) that were quantized, rows padded to a multiple of ``backend.row_multiple``.
            dtype: the readers' half dtype, from which the values were rounded.
            rowwise, columnwise: orientations of ``data``; a reader that trains needs both.
            record: whether the readers train (``module.training``).
            reader: is told when the operand is read.
        """
        if not may_change_unseen(source):
            self._keep(source, backend, torch.Size(shape), dtype, operand, record, data, rowwise, columnwise, reader)

    def _keep(
        self, source: Tensor, backend: Backend, shape: torch.Size, dtype: torch.dtype, operand: Operand, record: bool,
        data: Any, rowwise: bool, columnwise: bool, reader: Reader | None,
    ) -> None:  # fmt: skip
        delayed = operand.slot is not None and not operand.slot.cold
        made = _Quantized(
            type(backend), shape, dtype, operand, record, self._step, data, rowwise, columnwise, delayed, reader
        )
        self._quantized.set(source, made)

    def gradient(self, source: Tensor) -> tuple[InputGradient, Tensor | None]:
        """The sum of the gradient of ``source``, and the handle; None for the first layer that reads ``source``."""
        found: tuple[InputGradient, Tensor | None] | None = self._gradient.get(source)
        return found or (InputGradient(), None)

    def give_out(self, source: Tensor, gradient: InputGradient, handle: Tensor) -> None:
        """Let later layers read ``handle`` in the place of ``source``. A leaf has no handle."""
        # Nothing that the handle's graph holds may hold the handle: such a circle is never freed. A leaf is held.
        if not source.is_leaf:
            self._gradient.set(source, (gradient, handle))


def may_change_unseen(source: Tensor) -> bool:
    """Whether the values may change while the version does not.

    Inference tensors count no versions, and a leaf that is trained may be written through ``.data``. A parameter also
    must not be referenced weakly: ``torch.utils.swap_tensors`` refuses such a tensor.
    """
    return source.is_inference() or (source.is_leaf and (source.requires_grad or isinstance(source, nn.Parameter)))

"""What a module between converted layers hands to them: values that its kernel has quantized already.

An activation quantizes its result for the layer that reads the result, and the gradient of its input for the
layer whose output that input is. Who reads is not written in the model's code; it is learned:

``Reader``      belongs to a producer. The layer that reads the producer's result for the first time tells the reader of
                itself; from the next pass on the producer hands over quantized results (``SharedInput.offer``).
``GradReader``  travels with a layer's output. A module that finds it on its input hands over the quantized gradient of
                that input (``offer``); the layer's backward pass takes the gradient (``offered``).

The half-precision tensor is there as well, for readers of any other kind, unless the producer knows that there are none
(``absent``). What was handed over is bound to the tensor object and its version: where the tensor was changed, added to
or replaced, the layer quantizes the values itself.

Scales have to be known before the values: both work with delayed scaling alone, once a history has begun.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from nemo_lowprec.compat.tensors import base_of
from nemo_lowprec.compute.backends.base import Backend
from nemo_lowprec.compute.operands import Operand

_READER, _GRAD_READER, _OFFERED = "_lowprec_reader", "_lowprec_grad_reader", "_lowprec_quantized"
_ABSENT = "_lowprec_absent"


class Reader:
    """The converted layer that reads what a producer returns, as the passes before have shown.

    Attributes:
        backend: the layer's; None where no layer is known.
        operand: the layer's ``input``.
        half: the layer's half dtype.
    """

    backend: Backend | None = None
    operand: Operand
    half: torch.dtype

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Know no layer: layers compute in other ways than before."""
        self.backend = None
        self._inputs: Any = None
        # By whether autograd was on, as in the two passes of reentrant activation checkpointing; the mode asked last.
        self._columnwise: dict[bool, bool] = {}
        self._grad = self._record = False
        self._taken = True
        self._operands: list[Operand] = []  # of all layers that have read the result; the first one quantizes it
        self._ambiguous = False

    def __reduce__(self) -> tuple[Any, ...]:
        return Reader, ()  # a copied producer learns anew

    def state_dict(self, names: Mapping[int, str]) -> dict[str, Any] | None:
        """The layers, and how the first one reads; None where no layer has read a result.

        Args:
            names: of the layers, by the ids of their ``input`` operands.
        """
        layers = [names[id(operand)] for operand in self._operands if id(operand) in names]
        if len(layers) < len(self._operands) or not layers:
            return None
        reads = self.backend is not None and id(self.operand) in names
        return {
            "layers": layers,
            "layer": names[id(self.operand)] if reads else None,
            "columnwise": [[grad, wanted] for grad, wanted in self._columnwise.items()],
            "record": self._record,
            "ambiguous": self._ambiguous,
        }

    def load_state_dict(self, state: Mapping[str, Any], plans: Mapping[str, Any]) -> None:
        """Know the layers of a ``state_dict`` by their ``GemmPlan``; nothing is known where a plan is missing."""
        self.forget()
        found = [plans[name] for name in state["layers"] if name in plans and "input" in plans[name].operands]
        if len(found) < len(state["layers"]):
            return
        self._operands = [plan.operands["input"] for plan in found]
        self._ambiguous = state["ambiguous"]
        if state["layer"] is not None:
            plan = plans[state["layer"]]
            self.backend, self.operand, self.half = plan.backend, plan.operands["input"], plan.half
            self._inputs, self._record = plan.inputs, state["record"]
            self._columnwise = {grad: wanted for grad, wanted in state["columnwise"]}

    def learn(
        self, inputs: Any, backend: Backend, operand: Operand, half: torch.dtype, columnwise: bool, record: bool
    ) -> None:
        """A layer has quantized the producer's result itself; the arguments are those of ``SharedInput.quantize``."""
        if not self._operands:
            self._operands.append(operand)
        elif self._operands[0] is not operand:
            self._ambiguous = True  # a module with several places in the model: nobody knows which one calls it
        if self.backend is None or self.operand is not operand:
            self._columnwise = {}
        backend = None if self._ambiguous else backend  # type: ignore[assignment]
        self._inputs, self.backend, self.operand, self.half = inputs, backend, operand, half
        self._columnwise[self._grad], self._record, self._taken = columnwise, record, True

    def wants(self, rows: int, half: torch.dtype, record: bool, grad: bool) -> bool:
        """Whether the layer will read a quantized result of this pass. Asked in every pass, before ``name_reader``.

        Args:
            rows: of the result.
            half: its dtype.
            record: whether the producer trains.
            grad: whether autograd is on.
        """
        self._grad = grad
        if self.backend is None:
            return False
        if not self._taken:  # the layer of the pass before has not read what was offered
            self.backend = None
            return False
        slot = self.operand.slot
        fits = half == self.half and record == self._record and grad in self._columnwise
        return fits and slot is not None and not slot.cold and rows > 0 and rows % self.backend.row_multiple == 0

    def called(self, grad: bool) -> None:
        """The producer has returned a result, with autograd on if ``grad``; a layer that reads it learns for that."""
        self._grad = grad

    @property
    def columnwise(self) -> bool:
        """Whether the layer reads the columnwise data, too, for its weight's gradient."""
        return self._columnwise[self._grad]

    @property
    def record(self) -> bool:
        """Whether the producer enters the amax into ``operand.slot``."""
        return self._record

    def follow(self, operand: Operand) -> None:
        """A further layer has read what the first one has quantized, as its own input ``operand``."""
        if not self.knows(operand):
            self._operands.append(operand)

    def knows(self, operand: Operand) -> bool:
        """Whether the layer with the input ``operand`` is one that reads the producer's result."""
        return any(known is operand for known in self._operands)

    def keep_to(self, slots: Sequence[Any]) -> None:
        """Forget the layer if its input's ``AmaxSlot`` is none of ``slots``."""
        if self.backend is not None and not any(self.operand.slot is slot for slot in slots):
            self.backend = None

    def take(self) -> None:
        """The layer has read what was offered."""
        self._taken = True

    def offer(self, result: Tensor, data: Any) -> None:
        """Hand ``data``, the quantized ``result`` [..., features] (rowwise, and columnwise where wanted), over."""
        self._taken = False
        features = result.shape[-1]
        self._inputs.offer(
            self.backend, result, data, self.operand, shape=(result.numel() // features, features), dtype=self.half,
            rowwise=True, columnwise=self.columnwise, record=self._record, reader=self,
        )  # fmt: skip


@lru_cache(maxsize=16)
def _nan(device: torch.device, dtype: torch.dtype) -> Tensor:
    return torch.full((), float("nan"), dtype=dtype, device=device)


def absent(like: Tensor, shape: Sequence[int], compute: Callable[[], Tensor] | None = None) -> Tensor:
    """A tensor of NaN without memory, in the place of values that are handed over in FP8 alone.

    Args:
        like: has the dtype and the device.
        compute: computes the values, for a layer that does not take what was handed over.
    """
    # A traced tensor has another class, and is kept nowhere.
    nan = _nan(like.device, like.dtype) if type(like) is Tensor else like.new_full((), float("nan"))
    values = nan.expand(shape)
    values.__dict__[_ABSENT] = (compute,)
    return values


def computed(values: Tensor) -> Tensor:
    """``values``; computed, where they are absent.

    Raises:
        RuntimeError: nothing can compute them.
    """
    found = values.__dict__.get(_ABSENT)
    if found is None:
        return values
    if found[0] is None:
        raise RuntimeError(
            "The gradient of a layer inside of a gated MLP was handed over in FP8 alone, and something has changed it "
            "on its way. Register the hook that does so before the forward pass, on the layer."
        )
    return found[0]()  # type: ignore[no-any-return]


def name_reader(result: Tensor, reader: Reader) -> None:
    """Let the layer that reads ``result`` tell ``reader`` of itself."""
    reader.called(torch.is_grad_enabled())
    result.__dict__[_READER] = reader, result._version


def reader_of(source: Tensor) -> Reader | None:
    """The ``Reader`` of the producer that has returned ``source``."""
    reader, version = source.__dict__.get(_READER, (None, 0))
    return reader if version == source._version else None


class GradReader:
    """The converted layer that will read the gradient of a tensor, which is the layer's output.

    Attributes:
        backend, half: the layer's.
        operand: the layer's ``grad_output``.
        rowwise, columnwise: the orientations that its backward pass reads.
        sums: whether it reads the sums of the columns, too: the gradient of its bias.
        record: whether the amax enters ``operand.slot``.
    """

    __slots__ = ("backend", "columnwise", "half", "operand", "record", "rowwise", "sums")

    def __init__(self, plan: Any, rowwise: bool, columnwise: bool, sums: bool, record: bool) -> None:
        self.backend: Backend = plan.backend
        self.operand: Operand = plan.operands["grad_output"]
        self.half: torch.dtype = plan.half
        self.rowwise, self.columnwise, self.sums, self.record = rowwise, columnwise, sums, record

    @staticmethod
    def add(plan: Any, output: Tensor, rowwise: bool, columnwise: bool, sums: bool, record: bool) -> None:
        """Let who makes the gradient of ``output`` find the layer of ``plan``."""
        there: GradReader | None = plan.grad_reader
        wanted = rowwise, columnwise, sums, record
        if there is None or (there.rowwise, there.columnwise, there.sums, there.record) != wanted:
            there = plan.grad_reader = GradReader(plan, *wanted)
        output.__dict__[_GRAD_READER] = there, output._version

    @staticmethod
    def of(tensor: Tensor) -> GradReader | None:
        """The reader of the gradient of ``tensor``; None where none is known."""
        found: tuple[GradReader, int] | None = tensor.__dict__.get(_GRAD_READER)
        return found[0] if found is not None and found[1] == tensor._version else None

    def wants(self, rows: int, dtype: torch.dtype) -> bool:
        """Whether the layer takes a quantized gradient of [rows, out_features] in ``dtype``; asked in backward."""
        slot = self.operand.slot
        warm = slot is not None and not slot.cold and self.operand.direct
        return warm and dtype == self.half and rows % self.backend.row_multiple == 0 and not torch.is_grad_enabled()

    def offer(self, grad: Tensor, data: Any, sums: Tensor | None) -> None:
        """Hand over what was made of ``grad``, which the caller's backward pass returns as this object.

        Args:
            data: the quantized gradient, in the orientations that the layer reads.
            sums: of its columns, FP32 [out_features].
        """
        grad.__dict__[_OFFERED] = self.operand, grad._version, data, sums
        self.operand.expected = True

    def announce(self, grad: Tensor) -> None:
        """Say that the caller's backward pass returns ``grad`` as this object, where nothing is handed over.

        So the layer learns whether the gradient reaches it as it is, before an amax of another gradient is recorded.
        """
        self.offer(grad, None, None)


def offered(grad: Tensor, operand: Operand) -> tuple[Any, Tensor | None] | None:
    """(quantized gradient, sums of its columns) that the maker of ``grad`` has handed over for ``operand``.

    A reshaped view of all that was handed over counts as the same tensor.
    """
    there, base = grad.__dict__.get(_OFFERED), base_of(grad)
    if there is None and base is not None and _OFFERED in base.__dict__ and _is_all_of(base, grad):
        there = base.__dict__[_OFFERED]
    if there is None or there[0] is not operand or there[1] != grad._version:
        operand.direct = operand.direct and not operand.expected
        operand.expected = operand.offered = False
        return None
    operand.expected, operand.direct, operand.offered = False, True, True
    return None if there[2] is None else (there[2], there[3])


def _is_all_of(base: Tensor, view: Tensor) -> bool:
    """Whether ``view`` has the same elements in the same order and in rows of the same length."""
    alike = view.shape[-1:] == base.shape[-1:] and view.numel() == base.numel() and view.dtype == base.dtype
    return alike and view.data_ptr() == base.data_ptr() and view.is_contiguous() and base.is_contiguous()

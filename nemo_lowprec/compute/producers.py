"""What a module between converted layers hands to them: gradients that its kernel has quantized already.

The layer whose output a module reads is not written in the model's code. So a ``GradReader`` travels with the output.
The module that finds the ``GradReader`` hands over the quantized gradient of the output (``offer``), and the layer's
backward pass takes the gradient (``offered``).

The half-precision tensor is there as well, for readers of any other kind. What was handed over is bound to the tensor
object and its version: where the tensor was changed, added to or replaced, the layer quantizes the values itself.

The scale has to be known before the values: that is so with delayed scaling alone, once a history has begun.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from nemo_lowprec.compat.tensors import base_of
from nemo_lowprec.compute.backends.base import Backend
from nemo_lowprec.compute.operands import Operand

_GRAD_READER, _OFFERED = "_lowprec_grad_reader", "_lowprec_quantized"


class GradReader:
    """The converted layer that will read the gradient of a tensor, which is the layer's output.

    Attributes:
        backend, half: the layer's.
        operand: the layer's ``grad_output``.
        rowwise, columnwise: the orientations that its backward pass reads.
        sums: whether it reads the sums of the columns, too: the gradient of its bias.
        record: whether the amax enters ``operand.slot``.
    """

    __slots__ = ("_version", "backend", "columnwise", "half", "operand", "record", "rowwise", "sums")

    def __init__(self, plan: Any, output: Tensor, rowwise: bool, columnwise: bool, sums: bool, record: bool) -> None:
        self.backend: Backend = plan.backend
        self.operand: Operand = plan.operands["grad_output"]
        self.half: torch.dtype = plan.half
        self.rowwise, self.columnwise, self.sums, self.record = rowwise, columnwise, sums, record
        self._version = output._version
        output.__dict__[_GRAD_READER] = self

    @staticmethod
    def of(tensor: Tensor) -> GradReader | None:
        """The reader of the gradient of ``tensor``; None where none is known."""
        found: GradReader | None = tensor.__dict__.get(_GRAD_READER)
        return found if found is not None and found._version == tensor._version else None

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
        operand.expected = False
        return None
    operand.expected, operand.direct = False, True
    return None if there[2] is None else (there[2], there[3])


def _is_all_of(base: Tensor, view: Tensor) -> bool:
    """Whether ``view`` has the same elements in the same order and in rows of the same length."""
    alike = view.shape[-1:] == base.shape[-1:] and view.numel() == base.numel() and view.dtype == base.dtype
    return alike and view.data_ptr() == base.data_ptr() and view.is_contiguous() and base.is_contiguous()

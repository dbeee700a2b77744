"""Gradients in FP8 in memory that is written pass after pass, while nobody else holds it."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from operator import gt

import torch
from torch import Tensor

from nemo_lowprec.compat.tensors import storage_use_count, use_count
from nemo_lowprec.kernels.loader import block_kernels
from nemo_lowprec.tensors.gradient import GradientTensor


class Holders:
    """Tells whether others than the owner hold a gradient."""

    def __init__(self) -> None:
        self._alone: tuple[int, ...] | None = None

    def are_there(self, tensor: GradientTensor) -> bool:
        """Whether others hold ``tensor``, or memory of its data.

        All calls are about one tensor, and come from one place: the call holds the tensor, too. At the first call the
        owner alone holds the tensor.
        """
        data = tensor.data_blocks  # an alias of the tensor has the same object
        count = sys.getrefcount(tensor), use_count(tensor), sys.getrefcount(data), storage_use_count(data)
        if self._alone is None:
            self._alone = count
        return any(map(gt, count, self._alone))


class ReusedGradients:
    """Gradients that are quantized together, on a GPU in one launch.

    To make and to free the tensors of a gradient takes the host longer than a launch.

    Args:
        grads: of one dtype, on one device. The next gradients have their shapes.
    """

    def __init__(self, grads: Sequence[Tensor]) -> None:
        self._flags = _flags(grads)
        self._slots = [_Slot(grad, flag) for grad, flag in zip(grads, self._flags.split(1), strict=True)]
        kernels = block_kernels() if grads[0].is_cuda else None
        self._together = None if kernels is None else kernels.QuantizeMany()

    @property
    def nbytes(self) -> int:
        """Bytes of the gradients."""
        return sum(slot.tensor.stored_bytes() for slot in self._slots)

    def fit(self, grads: Sequence[Tensor]) -> bool:
        """Whether ``grads`` have the shapes of these gradients."""
        return [grad.shape for grad in grads] == [slot.tensor.shape for slot in self._slots]

    def store(self, grads: Sequence[Tensor]) -> list[GradientTensor]:
        """``GradientTensor.from_float`` of each of ``grads``, which ``fit``."""
        held = [slot.is_held() for slot in self._slots]
        if any(held):  # the held gradients keep their flags, too
            self._flags = _flags(grads)
            for is_held, slot, grad, flag in zip(held, self._slots, grads, self._flags.split(1), strict=True):
                if is_held:
                    slot.renew(grad, flag)
                else:
                    slot.tensor.nonfinite = flag
        else:
            self._flags.zero_()
        if self._together is not None and all(map(self._together.takes, grads)):
            self._together(grads, [slot.into for slot in self._slots], self._flags)
        else:
            for slot, grad in zip(self._slots, grads, strict=True):
                slot.tensor.store_(grad)
        return [slot.tensor.renewed_() for slot in self._slots]


def _flags(grads: Sequence[Tensor]) -> Tensor:
    """``GradientTensor.nonfinite`` of all ``grads``, FP32 [gradients]: zeros."""
    return torch.zeros(len(grads), device=grads[0].device, dtype=torch.float32)


class _Slot:
    """The memory of one gradient.

    Attributes:
        tensor: the gradient that was handed out last.
        into: addresses of its data and exponents.
    """

    def __init__(self, like: Tensor, flag: Tensor) -> None:
        self.renew(like, flag)

    def renew(self, like: Tensor, flag: Tensor) -> None:
        """Take new memory, for a gradient of the shape of ``like``; ``flag`` is its ``nonfinite``."""
        self.tensor, self._holders = GradientTensor.empty(like, flag), Holders()
        self.into = self.tensor.data_blocks.data_ptr(), self.tensor.exponent.data_ptr()
        self.is_held()

    def is_held(self) -> bool:
        """Whether somebody else holds the gradient."""
        return self._holders.are_there(self.tensor)

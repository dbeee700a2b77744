"""Parameters and running statistics that came in half precision and are FP32 while the model is converted."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from nemo_lowprec.compat.modules import NormWithStatistics

HALVES = (torch.float16, torch.bfloat16)
_CAME_AS = "_lowprec_came_as"  # attribute of a widened tensor that is not trained: its original dtype


def note_original_dtype(tensor: Tensor, dtype: torch.dtype | None) -> None:
    """Note that the FP32 ``tensor`` is to be saved and given back in ``dtype``; None for FP32."""
    if dtype is None:
        tensor.__dict__.pop(_CAME_AS, None)
    else:
        tensor.__dict__[_CAME_AS] = dtype


def to_original_dtype(tensor: Tensor, values: Tensor) -> Tensor:
    """``values`` in the noted original dtype of ``tensor``; unchanged where the dtype would round a value."""
    dtype = tensor.__dict__.get(_CAME_AS)
    as_before = values if dtype is None else values.to(dtype)
    return as_before if torch.equal(as_before.to(values.dtype), values) else values


class Widened:
    """The widened tensors of one model.

    Args:
        training: whether the model is trained; parameters that require a gradient then stay FP32 afterwards.
    """

    def __init__(self, training: bool = True) -> None:
        self._training = training
        self._tensors: list[Tensor] = []

    def add(self, tensor: Tensor) -> None:
        """Widen ``tensor``, a parameter or a buffer, to FP32 where its dtype is FP16 or BF16."""
        if tensor.dtype not in HALVES:
            return
        if not (self._training and tensor.requires_grad):
            note_original_dtype(tensor, tensor.dtype)
            self._tensors.append(tensor)
        tensor.grad = None
        tensor.data = tensor.data.float()

    def add_statistics(self, module: nn.Module) -> None:
        """Widen the running statistics of ``module``: a norm with FP32 weights takes FP32 statistics only."""
        if isinstance(module, NormWithStatistics):
            for buffer in module._buffers.values():
                if buffer is not None:
                    self.add(buffer)

    def follow(self) -> None:
        """Let parameters that were unfrozen stay FP32 after the conversion."""
        for tensor in self._tensors:
            if tensor.requires_grad and self._training:
                note_original_dtype(tensor, None)

    def remove(self) -> None:
        """Give the tensors their original dtypes back, but for tensors with values that the dtype would round."""
        for tensor in self._tensors:
            tensor.data = to_original_dtype(tensor, tensor.data)
            if tensor.is_leaf:
                tensor.grad_dtype = tensor.dtype
            note_original_dtype(tensor, None)
        self._tensors.clear()

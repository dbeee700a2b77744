"""Parameters and running statistics that came in half precision and are computed with in FP32."""

from __future__ import annotations

import torch
from torch import Tensor, nn

HALVES = (torch.float16, torch.bfloat16)
_CAME_AS = "_lowprec_came_as"  # on a tensor that is not trained: its dtype before


def note_original_dtype(tensor: Tensor, dtype: torch.dtype | None) -> None:
    """``tensor``, which is FP32 now, is saved and given back in ``dtype``; None: in FP32."""
    if dtype is None:
        tensor.__dict__.pop(_CAME_AS, None)
    else:
        tensor.__dict__[_CAME_AS] = dtype


def to_original_dtype(tensor: Tensor, values: Tensor) -> Tensor:
    """``values`` of ``tensor`` in its noted original dtype, if that rounds none of them; else unchanged."""
    dtype = tensor.__dict__.get(_CAME_AS)
    as_before = values if dtype is None else values.to(dtype)
    return as_before if torch.equal(as_before.to(values.dtype), values) else values


class Widened:
    """The tensors of one model that are FP32 as long as it is converted.

    Args:
        training: whether the model is trained: then parameters with a gradient stay FP32.
    """

    def __init__(self, training: bool = True) -> None:
        self._training = training
        self._tensors: list[Tensor] = []

    def add(self, tensor: Tensor) -> None:
        """Make a parameter or buffer FP32 that is FP16 or BF16."""
        if tensor.dtype not in HALVES:
            return
        if not (self._training and tensor.requires_grad):
            note_original_dtype(tensor, tensor.dtype)
            self._tensors.append(tensor)
        tensor.grad = None
        tensor.data = tensor.data.float()

    def add_statistics(self, module: nn.Module) -> None:
        """Make the running statistics of ``module`` FP32: a norm takes no others beside FP32 weights."""
        if isinstance(module, nn.modules.batchnorm._NormBase):
            for buffer in module._buffers.values():
                if buffer is not None:
                    self.add(buffer)

    def follow(self) -> None:
        """Parameters that were unfrozen stay FP32 from now on."""
        for tensor in self._tensors:
            if tensor.requires_grad and self._training:
                note_original_dtype(tensor, None)

    def remove(self) -> None:
        """Give the tensors their original dtypes back where no value was changed."""
        for tensor in self._tensors:
            tensor.data = to_original_dtype(tensor, tensor.data)
            if tensor.is_leaf:
                tensor.grad_dtype = tensor.dtype
            note_original_dtype(tensor, None)
        self._tensors.clear()

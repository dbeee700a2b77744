"""Gradients that the level stores in FP8, quantized by the backward graph that computes them.

Without it a hook of each parameter would quantize the gradient after the graph, which takes the host 40 µs a parameter.
The graph writes the same memory whenever it runs, and its tensors are handed out again and again. Where somebody still
holds such a tensor, it keeps its values, and the next gradient is a copy.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from operator import gt

import torch
from torch import Tensor, nn

from nemo_lowprec.compat.tensors import storage_use_count, use_count
from nemo_lowprec.tensors import GradientTensor
from nemo_lowprec.tensors.gradient import is_stored_in_fp8, offer_quantized


class QuantizedGradients:
    """The gradients in FP8 of those of ``params`` whose gradients are stored so."""

    def __init__(self, params: Sequence[nn.Parameter]) -> None:
        self._params = params
        chosen = [i for i, param in enumerate(params) if is_stored_in_fp8(param)]
        self._flags = torch.zeros(len(chosen), device=params[0].device if chosen else "cpu")
        self._lent = {
            i: _Lent(GradientTensor.empty(params[i], self._flags[at : at + 1])) for at, i in enumerate(chosen)
        }

    def quantize(self, grads: Sequence[Tensor | None]) -> None:
        """Store ``grads``, which belong to the parameters; a graph is captured that does so whenever it runs."""
        self._lent = {i: lent for i, lent in self._lent.items() if grads[i] is not None}
        if self._lent:
            self._flags.zero_()
        for i, lent in self._lent.items():
            lent.quantize(grads[i])  # type: ignore[arg-type]

    def hold(self) -> None:
        """The graph is about to run: keep what somebody holds."""
        for i, lent in self._lent.items():
            if self._params[i].grad is lent.tensor:
                self._params[i].grad = lent.tensor.copied()  # of an earlier micro-batch, to which autograd adds
            lent.hold()

    def offer(self, grads: Sequence[Tensor | None]) -> None:
        """The graph has run: hand the gradients over, for those that autograd gets as ``grads``."""
        for i, lent in self._lent.items():
            quantized, grad, param = lent.take(), grads[i], self._params[i]
            if grad is not None and param.grad is None:
                offer_quantized(param, grad, quantized)


class _Lent:
    """A tensor in memory that a graph writes."""

    def __init__(self, tensor: GradientTensor) -> None:
        self.tensor = tensor
        self._memory = [part.detach() for part in (tensor.data_blocks, tensor.exponent, tensor.nonfinite)]
        self._held: list[Tensor] | None = None
        self._alone: tuple[int, ...] | None = None  # ``_count`` before the tensor was handed out

    def _count(self) -> tuple[int, ...]:
        """How often the tensor and its memory are held. An alias of the tensor has the same ``data_blocks``."""
        tensor, data = self.tensor, self.tensor.data_blocks
        return sys.getrefcount(tensor), use_count(tensor), sys.getrefcount(data), storage_use_count(data)

    def quantize(self, grad: Tensor) -> None:
        self.tensor.store_(grad)

    def hold(self) -> None:
        count = self._count()
        self._alone = self._alone or count
        self._held = [part.clone() for part in self._memory] if any(map(gt, count, self._alone)) else None

    def take(self) -> GradientTensor:
        """The values that the graph has written."""
        if self._held is None:
            return self.tensor.renewed_()
        data, exponent, nonfinite = (part.clone() for part in self._memory)
        for part, values in zip(self._memory, self._held, strict=True):
            part.copy_(values)
        self._held = None
        return GradientTensor.of_parts(data, exponent, nonfinite)

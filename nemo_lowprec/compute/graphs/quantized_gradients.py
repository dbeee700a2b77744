"""Gradients that the level stores in FP8, quantized by the backward graph that computes them.

Otherwise a hook of each parameter quantizes the gradient after the graph, which takes the host 40 µs a parameter. The
graph writes the same memory whenever the graph runs, and the same tensors are handed out again and again. A tensor that
somebody still holds keeps its values, and the next gradient is a copy.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from nemo_lowprec.observers import NOBODY, Observers
from nemo_lowprec.tensors import GradientTensor
from nemo_lowprec.tensors.gradient import is_stored_in_fp8, offer_quantized
from nemo_lowprec.tensors.reused_gradients import Holders


class QuantizedGradients:
    """The FP8 gradients of ``params``; a parameter whose gradient is stored otherwise is left out.

    Args:
        observers: of the engine, which are told of gradients when they are quantized.
    """

    def __init__(self, params: Sequence[nn.Parameter], observers: Observers = NOBODY) -> None:
        self._params, self._observers = params, observers
        chosen = [i for i, param in enumerate(params) if is_stored_in_fp8(param)]
        self._flags = torch.zeros(len(chosen), device=params[0].device if chosen else "cpu", dtype=torch.float32)
        self._stored = {
            i: _Stored(GradientTensor.empty(params[i], self._flags[at : at + 1])) for at, i in enumerate(chosen)
        }

    def quantize(self, grads: Sequence[Tensor | None]) -> None:
        """Store ``grads``, one for each parameter. Called in the capture of a graph, which does so whenever it runs."""
        self._stored = {i: stored for i, stored in self._stored.items() if grads[i] is not None}
        if self._stored:
            self._flags.zero_()
        for i, stored in self._stored.items():
            grad: Tensor = grads[i]  # type: ignore[assignment]
            stored.quantize(grad)
            for see in self._observers.gradient:
                see(self._params[i], stored.tensor, grad)

    def hold(self) -> None:
        """The graph is about to run: copy the gradients that somebody holds."""
        for i, stored in self._stored.items():
            if self._params[i].grad is stored.tensor:
                self._params[i].grad = stored.tensor.copied()  # of an earlier micro-batch, to which autograd adds
            stored.hold()

    def offer(self, grads: Sequence[Tensor | None]) -> None:
        """The graph has run: hand the quantized gradients over. Autograd gets ``grads``, one for each parameter."""
        for i, stored in self._stored.items():
            quantized, grad, param = stored.take(), grads[i], self._params[i]
            if grad is not None and param.grad is None:
                offer_quantized(param, grad, quantized)


class _Stored:
    """A tensor in memory that a graph writes."""

    def __init__(self, tensor: GradientTensor) -> None:
        self.tensor = tensor
        self._memory = [part.detach() for part in (tensor.data_blocks, tensor.exponent, tensor.nonfinite)]
        self._held: list[Tensor] | None = None
        self._holders = Holders()

    def quantize(self, grad: Tensor) -> None:
        self.tensor.store_(grad)

    def hold(self) -> None:
        self._held = [part.clone() for part in self._memory] if self._holders.are_there(self.tensor) else None

    def take(self) -> GradientTensor:
        """The values that the graph has written."""
        if self._held is None:
            return self.tensor.renewed_()
        data, exponent, nonfinite = (part.clone() for part in self._memory)
        for part, values in zip(self._memory, self._held, strict=True):
            part.copy_(values)
        self._held = None
        return GradientTensor.of_parts(data, exponent, nonfinite)

"""Stores gradients in FP8 as soon as autograd has computed them, and frees the high-precision gradients at once.

``p.grad`` becomes a ``GradientTensor``, which reads as FP32. The gradients of later micro-batches are added to the
``GradientTensor``. Gradients of small matrices are stored together, a few MiB at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from nemo_lowprec.column import Column
from nemo_lowprec.grads.waiting import WaitingGradients
from nemo_lowprec.observers import NOBODY, Observers
from nemo_lowprec.tensors import GradientTensor
from nemo_lowprec.tensors.gradient import DETACHED_GRADS, compute_gradient_as, note_stored_in_fp8, take_quantized
from nemo_lowprec.tensors.marks import Marks

_RELEASED = "gradient_release"


def is_released(param: Tensor) -> bool:
    """Whether ``param`` steps in backward, as soon as its gradient is computed (gradient release)."""
    return hasattr(param, _RELEASED)


class Fp8Gradients(Column):
    """Hooks that store the gradients of some parameters.

    Args:
        release: called with a parameter once its gradient is stored; steps the parameter and drops the gradient.
        detached: whether gradients become ``DETACHED_GRADS`` of their parameters, so that FSDP2 does not reduce them.
        params: returns the parameters whose gradients are stored; called before each backward pass. The parameters'
            hooks hold a reference to ``params``.
        observers: are told of each stored gradient.
        half: the level's half dtype. Backward computes the gradients in it where that is BF16.
    """

    def __init__(
        self,
        release: Callable[[Tensor], None] | None = None,
        detached: bool = False,
        params: Callable[[], Iterable[Tensor] | None] = tuple,
        observers: Observers = NOBODY,
        half: torch.dtype | None = None,
    ) -> None:
        self.release, self._detached, self._params, self._observers = release, detached, params, observers
        # BF16 has five bits of mantissa more than E4M3 and the range of FP32, at half the bytes of FP32.
        self._computed_as = half if half == torch.bfloat16 else None
        self._waiting = WaitingGradients()
        self._covered = Marks("fp8_gradient")  # asked for every parameter in every backward pass
        # Weak: hooks of parameters hold this object (see ``tensors/weak_hooks.py``).
        self._handles: Any = WeakIdKeyDictionary()

    def before_backward(self) -> None:
        self._waiting.store()  # of a pass that has failed
        self.cover(self._params() or ())

    settle = before_backward

    def cover(self, params: Iterable[Tensor]) -> None:
        """Store the gradients of ``params`` from now on, but for parameters that require no gradient yet."""
        for param in params:
            # A pickled parameter takes its mark along, and not its hook.
            if param.requires_grad and self._covered.get(param) != id(param):
                self._covered.add(param, id(param))
                compute_gradient_as(param, self._computed_as if param.dim() > 1 else None)
                note_stored_in_fp8(param, param.dim() > 1 and self.release is None and not self._detached)
                self._handles[param] = param.register_post_accumulate_grad_hook(self._store)
                if self.release is not None:
                    setattr(param, _RELEASED, True)

    def _store(self, param: Tensor) -> None:
        grad, values, announced = param.grad, None, False
        if self._detached:
            assert grad is not None
            param.grad = None
            earlier = DETACHED_GRADS.get(param)
            stored = GradientTensor.from_float(grad) if earlier is None else earlier.accumulate_(grad)
            DETACHED_GRADS.add(param, stored)
            for see in self._observers.gradient:
                see(param, stored, grad if earlier is None else None)
            return
        if grad is not None and grad.requires_grad and torch.is_grad_enabled():
            # A gradient of backward(create_graph=True) keeps its graph, through which later losses reach the weights.
            if self.release is not None:
                raise RuntimeError(
                    "gradient_release=True drops each gradient at once, and this one is to be differentiated again "
                    "(create_graph=True). Leave one of them out."
                )
            return
        if grad is not None and not isinstance(grad, GradientTensor) and param.dim() > 1 and not grad.is_sparse:
            quantized = take_quantized(param, grad)
            may_wait = quantized is None and not self._observers.gradient and self.release is None
            if may_wait and self._waiting.take(param, grad):
                return
            values, grad = grad, GradientTensor.from_float(grad) if quantized is None else quantized
            param.grad = grad
            announced = quantized is not None
        if self._observers.gradient and isinstance(grad, GradientTensor) and not announced:
            for see in self._observers.gradient:
                see(param, grad, values)
        if self.release is not None:
            self.release(param)

    def remove(self) -> None:
        """Remove the hooks."""
        self._waiting.store()
        for param, handle in self._handles.items():
            handle.remove()
            self._covered.discard(param)
            DETACHED_GRADS.discard(param)
            compute_gradient_as(param, None)
            note_stored_in_fp8(param, False)
            param.__dict__.pop(_RELEASED, None)
        self._handles.clear()

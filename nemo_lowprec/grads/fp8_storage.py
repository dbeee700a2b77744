"""Gradients stored in FP8 as soon as they are complete; the high-precision one is freed at once.

``p.grad`` becomes a ``GradientTensor``, which reads as FP32; later micro-batches accumulate into it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any
from weakref import ref

import torch
from torch import Tensor

from nemo_lowprec.observers import NOBODY, Observers
from nemo_lowprec.tensors import GradientTensor

__all__ = ["Fp8Gradients", "is_released"]

_RELEASED = "gradient_release"


def is_released(param: Tensor) -> bool:
    """Whether ``param`` steps as soon as its gradient is there."""
    return hasattr(param, _RELEASED)


class Fp8Gradients:
    """Hooks that store the gradients of some parameters.

    Args:
        release: steps a parameter and drops the gradient; called as soon as the gradient is stored.
        apart: whether gradients are taken from their parameters (FSDP2 would reduce what it finds there).
        observers: each gradient is announced to them when it is stored.

    Attributes:
        apart: gradients that are not left on their parameters, by the parameters' id; None where they are.
        overflowed: what ``GradScaler`` asks beside the gradients, see ``GradientTensor``.
    """

    def __init__(
        self, release: Callable[[Tensor], None] | None = None, apart: bool = False, observers: Observers = NOBODY
    ) -> None:
        self.release, self._observers = release, observers
        self.apart: dict[int, GradientTensor] | None = {} if apart else None
        self.overflowed: Callable[[Tensor], Tensor | None] | None = None
        self._handles: dict[int, Any] = {}
        self._marked: list[ref[Tensor]] = []  # weak: their hooks hold this object (see ``formats/hooks.py``)

    def cover(self, params: Iterable[Tensor]) -> None:
        """Store the gradients of ``params`` from now on; parameters that take none yet are left for a later call."""
        for param in params:
            if param.requires_grad and id(param) not in self._handles:
                self._handles[id(param)] = param.register_post_accumulate_grad_hook(self._store)
                if self.release is not None:
                    setattr(param, _RELEASED, True)
                    self._marked.append(ref(param))

    def _store(self, param: Tensor) -> None:
        grad = param.grad
        if self.apart is not None:
            assert grad is not None
            param.grad = None
            if id(param) in self.apart:
                self.apart[id(param)].accumulate_(grad)
            else:
                self.apart[id(param)] = GradientTensor.from_float(grad)
            for see in self._observers.gradient:
                see(param, self.apart[id(param)])
            return
        if grad is not None and grad.requires_grad and torch.is_grad_enabled():
            # Of backward(create_graph=True): what is computed from it reaches the weights through its own graph.
            if self.release is not None:
                raise RuntimeError(
                    "gradient_release=True drops each gradient at once, and this one is to be differentiated again "
                    "(create_graph=True). Leave one of them out."
                )
            return
        if grad is not None and param.dim() > 1 and not isinstance(grad, GradientTensor) and not grad.is_sparse:
            param.grad = stored = GradientTensor.from_float(grad)
            stored.overflowed = self.overflowed
        if isinstance(param.grad, GradientTensor):
            for see in self._observers.gradient:
                see(param, param.grad)
        if self.release is not None:
            self.release(param)

    def remove(self) -> None:
        """Take the hooks away."""
        for handle in self._handles.values():
            handle.remove()
        self._handles.clear()
        for marked in self._marked:
            param = marked()
            if param is not None:
                delattr(param, _RELEASED)
        self._marked.clear()

"""Subscribers to the events of a training step.

An engine has one ``Observers``, and the engine's layers, gradients and messages hold a reference to it. The tuple of an
event's name has the subscribers' methods, and the event is announced by calling these methods::

    for see in observers.gradient:
        see(param, stored)

Without a subscriber the tuple is empty: nothing is computed, and nothing is launched.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

EVENTS = ("quantized", "gradient", "message", "mean", "before_update", "after_update", "step")


class Observer:
    """Base of a subscriber. A subclass overrides the events that it wants; other events are not announced to it.

    The tensors belong to the training: a subscriber reads them at once, changes none, and keeps copies only.

    Attributes:
        capturable: whether ``quantized`` and ``gradient`` may be captured in CUDA graphs. The methods then only launch
            kernels that read the tensors and write memory which lives as long as the subscriber; they are called in the
            capture alone, and their kernels run in every observed pass. Passes that another subscriber observes run
            without graphs.
        of_all_passes: whether passes are observed though the subscriber wants neither ``quantized`` nor ``gradient``.
    """

    capturable = False
    of_all_passes = False

    def quantized(self, layer: str, kind: str, values: Tensor, operand: Any, backend: Any) -> None:
        """An operand of a GEMM is ready: once in forward, and again where backward quantizes the operand again.

        Not announced: inputs without elements, layers inside ``torch.compile`` that compute in half precision,
        ``torch.jit.trace``, and gradients of ``torch.autograd.grad(is_grads_batched=True)``.

        Args:
            layer: name of the layer in ``Conversion``: the linear layer's name in the model, or the name of the weight
                of an input projection of ``nn.MultiheadAttention``.
            kind: ``input``, ``weight`` or ``grad_output``.
            values: [rows, features], the tensor that was quantized; any float dtype, or a weight in low-bit storage.
                Has the rows of zeros that pad the GEMM and, inside a transform of ``torch.func``, the transform's batch
                dimensions.
            operand: the operand that the GEMM reads: quantized by the backend, or a half tensor for a half GEMM.
            backend: runs the GEMM, and ``backend.describe(operand)`` is the operand's format; None for torch's own
                GEMM in half precision.
        """

    def gradient(self, param: Tensor, stored: Tensor, values: Tensor | None) -> None:
        """A gradient was stored in FP8; where a CUDA graph stores gradients, announced in its capture.

        Args:
            param: the parameter of the gradient: the whole parameter, gathered where the model is sharded.
            stored: ``GradientTensor`` of the parameter's shape, the sum over the micro-batches so far.
            values: the values before they were rounded, of the same shape, any float dtype; None where the gradient
                was added to a gradient of earlier micro-batches.
        """

    def message(self, kind: str, tensor: Tensor, bytes: int, purpose: str) -> None:
        """This package is about to send a tensor to other processes.

        Not announced: messages of torch and Megatron-core, and the settings that processes compare at the start.

        Args:
            kind: ``all_reduce``, ``all_gather``, ``all_to_all`` or ``broadcast``.
            tensor: the tensor that this process puts in.
            bytes: number of bytes that this process copies to other GPUs without a collective; 0 where a process group
                sends ``tensor``.
            purpose: ``gradient``, ``weight``, ``amax``, ``flag`` or ``monitor``.
        """

    def mean(self, received: Tensor, own: tuple[int, Tensor] | None, layout: Any, mean: Tensor) -> None:
        """This process has averaged gradients in FP8 that all processes have sent, and rounded the mean to FP8.

        Args:
            received, own, layout: the messages, as ``comm.wire.mean_of_messages`` takes them.
            mean: uint8 [bytes], the mean as it is sent on or stored.
        """

    def before_update(self, optimizer: Optimizer) -> None:
        """An optimizer is about to update its parameters, which have their true, clipped gradients."""

    def after_update(self, optimizer: Optimizer) -> None:
        """An optimizer has updated its parameters. The values did not change where the step was skipped: see ``step``.

        Announced in each step as soon as the host has launched the update.
        """

    def step(self, optimizer: Optimizer, skipped: bool) -> None:
        """An optimizer has stepped, or its step was skipped because a gradient is not finite.

        Announced once the host knows: at the latest when the next backward pass begins (``Step.settle``).
        """


class Observers:
    """The subscribers of one engine.

    Attributes:
        quantized, gradient, message, mean, before_update, after_update, step: the methods of the event's subscribers.
        of_passes: the subscribers that observe forward and backward passes.
        is_updating: whether an optimizer updates its parameters now.
    """

    quantized: tuple[Callable[..., None], ...]
    gradient: tuple[Callable[..., None], ...]
    message: tuple[Callable[..., None], ...]
    mean: tuple[Callable[..., None], ...]
    before_update: tuple[Callable[..., None], ...]
    after_update: tuple[Callable[..., None], ...]
    of_passes: tuple[Observer, ...]
    step: tuple[Callable[..., None], ...]
    is_updating = False

    def __init__(self) -> None:
        self._subscribers: list[Observer] = []
        self._sort()

    def add(self, observer: Observer) -> None:
        """Announce events to ``observer`` from now on."""
        self._subscribers.append(observer)
        self._sort()

    def remove(self, observer: Observer) -> None:
        """Announce no more events to ``observer``; nothing happens where ``observer`` does not subscribe."""
        self._subscribers = [one for one in self._subscribers if one is not observer]
        self._sort()

    @contextmanager
    def updating(self, optimizer: Optimizer) -> Iterator[None]:
        """Context in which ``optimizer`` updates its parameters."""
        for see in self.before_update:
            see(optimizer)
        self.is_updating = True
        try:
            yield
        finally:
            self.is_updating = False
        for see in self.after_update:
            see(optimizer)

    @contextmanager
    def watched_by(self, observer: Observer) -> Iterator[None]:
        """Context in which events are announced to ``observer``."""
        self.add(observer)
        try:
            yield
        finally:
            self.remove(observer)

    def _sort(self) -> None:
        for event in EVENTS:
            base = getattr(Observer, event)
            wanted = [one for one in self._subscribers if getattr(type(one), event) is not base]
            setattr(self, event, tuple(getattr(one, event) for one in wanted))
        seeing = {see.__self__ for see in (*self.quantized, *self.gradient)}  # type: ignore[attr-defined]
        self.of_passes = tuple(one for one in self._subscribers if one in seeing or one.of_all_passes)

    def __reduce__(self) -> tuple[Any, ...]:
        return _nobody, ()  # a copy of a model belongs to no engine


class _Nobody(Observers):
    def add(self, observer: Observer) -> None:
        raise TypeError("This layer belongs to no engine. Subscribe to engine.observers.")


def _nobody() -> Observers:
    return NOBODY


NOBODY = _Nobody()  # the observers of layers and gradients that were made without an engine

"""The engine: trains one model at one level, for any training loop."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from weakref import WeakSet

import torch
from torch import nn
from torch.optim import Optimizer

from nemo_lowprec.chart.options import Options
from nemo_lowprec.compat.compiler import outside_graphs
from nemo_lowprec.compute import AmaxState, revert_layers
from nemo_lowprec.engine.build import DTYPES, Sharding, build, new_amaxes
from nemo_lowprec.engine.columns import Columns
from nemo_lowprec.engine.late_optimizers import watch_for_optimizers
from nemo_lowprec.engine.step import Step
from nemo_lowprec.grads import LossScale
from nemo_lowprec.observers import Observers
from nemo_lowprec.optim import needs_closure

_ENGINE = "_lowprec_engine"


class Engine:
    """A row of the chart at work on one model.

    Args:
        options: the row and its arguments.
        reads_as: dtype that weights stored in FP16 read as; None for the level's half dtype.

    Attributes:
        columns: the columns of the row; after ``convert``, of the model.
        step: runs the steps of the model's optimizers.
        observers: the subscribers to the events of a step.
        sharding: the process groups of a sharded model, set before ``convert``; None for a whole model.
        model: the model that was converted last.
        optimizers: the attached optimizers.
        when_adopted: called with an optimizer that was attached at its first step (``late_optimizers.py``).
    """

    def __init__(self, options: Options, reads_as: torch.dtype | None = None) -> None:
        self.options, self.level, self.recipe = options, options.level, options.recipe
        self.half = DTYPES[options.level.autocast]
        self.reads_as = reads_as or self.half
        self.observers = Observers()
        self.sharding: Sharding | None = None
        self.model: nn.Module | None = None
        self.when_adopted: Callable[[Optimizer], None] | None = None
        self.optimizers: WeakSet[Optimizer] = WeakSet()
        self._hooks = ExitStack()
        self.amaxes = new_amaxes(self.recipe)
        self._take(self._build(self.amaxes))

    def _build(self, amaxes: AmaxState) -> Columns:
        return build(self.options, self.sharding, amaxes, self.reads_as, self.observers)

    def _take(self, columns: Columns) -> None:
        scaling = self.options.loss_scale
        self.columns = columns
        self.step = Step(columns, LossScale(scaling) if scaling is not None else None, self.observers)

    def __deepcopy__(self, memo: dict[int, Any]) -> Engine:
        return self  # a copy of the model is a model of no engine

    def __reduce__(self) -> Any:
        return Engine, (self.options, self.reads_as)  # to other processes, without the model

    # The model

    @staticmethod
    def of(model: nn.Module) -> Engine | None:
        """The engine that converted ``model``, or the model of which ``model`` is a copy; None for a plain model."""
        return model.__dict__.get(_ENGINE)

    def convert(self, model: nn.Module, device: torch.device, training: bool = True) -> None:
        """Convert ``model`` in place for ``device``; nothing happens where this engine has converted ``model``.

        A model that another engine has converted first gets its own layers and FP32 parameters back. Without
        ``training``, ``revert`` gives the model its original bits back.

        Raises:
            ValueError: the level, or the forced backend, cannot run on ``device``, or cannot store a parameter.
        """
        other = self.of(model)
        if other is not None and other.model is not model:  # a deep copy: its parameters are its own
            revert_layers(model)
            other = None
        if other is self and device == self.step.device:
            return
        # Histories and loss scale belong to one model.
        amaxes = self.amaxes if model is self.model else new_amaxes(self.recipe)
        columns = self._build(amaxes)
        columns.computation.check(model, device, training)
        if other is not None:
            other.revert()
        for column in (columns.weights, columns.states, columns.gradients, columns.comm):
            column.check(model, device, training)
        if model is not self.model:
            self.revert()
            self._take(columns)
        self.model, self.amaxes, self.columns, self.step.columns = model, amaxes, columns, columns
        self.step.device = device
        for column in columns:
            column.install(model, training)
        model.__dict__[_ENGINE] = self
        self._hooks.close()
        self._hooks.enter_context(model.register_state_dict_pre_hook(self._settle))
        watch_for_optimizers(self)

    def settle(self) -> None:
        """Call once the model is on its device or sharded, before the first step."""
        for column in self.columns:
            column.settle()
        if self.sharding is not None:
            self.columns.comm.share_amaxes(self.sharding.world)

    def revert(self) -> None:
        """Give the model its own layers and FP32 parameters back, and adopted optimizers their class.

        Histories and loss scale stay for the next time.
        """
        if self.model is None or self.model.__dict__.pop(_ENGINE, None) is not self:
            return
        self._hooks.close()
        for column in reversed(list(self.columns)):
            column.remove()
        self.optimizers.clear()

    def _settle(self, *_: Any) -> None:
        self.step.settle()

    # The optimizer

    def attach(self, optimizer: Optimizer) -> None:
        """Give ``optimizer`` its masters, or its low-bit states.

        Raises:
            ValueError: ``optimizer`` evaluates the loss itself, and the level scales the loss; or ``optimizer`` has
                no low-bit form, and the level has low-bit states.
        """
        if self.step.has_loss_scale and needs_closure(optimizer):
            raise ValueError(
                f"{type(optimizer).__name__} evaluates the loss inside its step, which FP16 loss scaling cannot "
                f"unscale. Use a bf16 level instead of {self.level.name}, or another optimizer."
            )
        if optimizer in self.optimizers:
            return
        self.check_optimizer(optimizer)
        for column in self.columns:
            column.attach(optimizer)
        self.optimizers.add(optimizer)

    def check_optimizer(self, optimizer: Optimizer) -> None:
        """Raise the ValueError that the columns' ``attach`` would raise; change nothing."""
        if optimizer not in self.optimizers:
            for column in self.columns:
                column.check_optimizer(optimizer)

    # Passes

    @contextmanager
    def forward_context(self) -> Iterator[None]:
        """Context of a forward pass at the level."""
        self._before_forward()
        with self.columns.computation.forward():
            yield

    @outside_graphs  # Fabric opens the context inside of a model that was compiled after ``fabric.setup``
    def _before_forward(self) -> None:
        for column in self.columns:
            column.before_forward()

    @contextmanager
    def backward_context(self, averages: bool = True) -> Iterator[None]:
        """Context of a backward pass, whose gradients are averaged over the processes if ``averages``."""
        with self.columns.computation.backward(), self.columns.comm.averaging(averages):
            yield

    def broadcast(self, buffers: bool = False) -> bool:
        """Give every process the weights (and ``buffers``) of the group's first; whether this process had others."""
        self.amaxes.forget_weights()
        changed = self.columns.comm.broadcast(buffers)
        self.columns.weights.note_frozen()  # a broadcast is no write by the user
        return changed

    # State

    def state_dict(self) -> dict[str, Any]:
        """Scales, histories and the loss scale as plain values; weights belong to the model's own state_dict."""
        self.step.settle()
        state: dict[str, Any] = {"level": self.level.name}
        for column in self.columns:
            state |= column.state_dict()
        if self.step.loss_scale is not None:
            state["loss_scale"] = self.step.loss_scale.state_dict()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a saved state of this or of another level; values that ``state`` lacks start afresh."""
        self.step.settle()
        for column in self.columns:
            column.load_state_dict(state)
        scale, saved = self.step.loss_scale, state.get("loss_scale", {})
        if scale is not None and saved:
            scale.load_state_dict(saved)
        if {"fp8", "te"} & state.keys():
            self.step.unit = float(saved.get("used", saved.get("scale", 1.0)))
            self.step.expect(scale.used if scale is not None else 1.0)

"""Gradients of manual optimization that do not come from the plugin: neither scaled nor averaged.

``self.manual_backward(loss)`` goes through the plugin; ``loss.backward()`` and gradients that are written by hand do
not. Lightning gives no warning: processes drift apart under Lightning's own DDP, too.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from weakref import ReferenceType, WeakKeyDictionary, ref

import lightning.pytorch as pl
from torch import Tensor
from torch.optim import Optimizer

from nemo_lowprec.engine import Engine
from nemo_lowprec.tensors.marks import Marks
from nemo_lowprec.tensors.weak_hooks import weakly
from nemo_lowprec.weights import ShardedWeights


class ManualPasses:
    """Watches the backward passes of a module with ``automatic_optimization = False``.

    Args:
        module: the module, whose parameters (whole, where FSDP2 gathers them) get a hook.
        engine: the engine that has converted ``module``.
        averages: whether gradients are averaged in the passes that the plugin runs, and in no other passes.
    """

    def __init__(self, module: pl.LightningModule, engine: Engine, averages: bool) -> None:
        self._module, self._engine, self._averages = module, engine, averages
        self._hooks = ExitStack()
        self._announced = self._in_step = self._has_direct = False
        self._covered = Marks("watched")
        self._direct = Marks("direct")  # parameters with a gradient from a pass that was not announced
        self._new = Marks("new_gradient")  # parameters with a gradient since their optimizer's last step
        self._passes = 0
        self._stepped: WeakKeyDictionary[Optimizer, tuple[int, list[ReferenceType[Tensor]]]] = WeakKeyDictionary()
        if isinstance(engine.columns.weights, ShardedWeights):
            engine.columns.weights.when_gathered.append(weakly(self.cover))

    def watch(self, optimizers: Iterable[Optimizer]) -> None:
        """Refuse steps that go around the plugin, where gradients are scaled."""
        if self._engine.step.has_loss_scale:
            for optimizer in optimizers:
                self._hooks.enter_context(optimizer.register_step_pre_hook(weakly(self._before_step)))

    def cover(self, params: Iterable[Tensor]) -> None:
        """Watch parameters that are trained by now."""
        for param in params:
            if param.requires_grad and param not in self._covered:
                self._covered.add(param)
                self._hooks.enter_context(param.register_post_accumulate_grad_hook(weakly(self._arrived)))

    def before_training_step(self) -> None:
        """Watch parameters that were unfrozen; a backward pass writes gradients of gathered, not of sharded ones."""
        if not self._engine.columns.weights.is_sharded:
            self.cover(self._module.parameters())

    @contextmanager
    def announced(self) -> Iterator[None]:
        """A backward pass that the plugin runs."""
        if self._has_direct:
            having = {id(param) for param, _, _ in self._gradients()}
            for param, _ in self._engine.columns.weights.gathered():
                if id(param) not in having:
                    self._direct.discard(param)
        self._announced = True
        try:
            yield
        finally:
            self._announced = False
        self._passes += 1

    def take_restored(self, params: Iterable[Tensor]) -> None:
        """Parameters were given the gradients that an interrupted run had made."""
        for param in params:
            self._new.add(param)
        self._passes += 1

    def check(self, optimizer: Optimizer) -> None:
        """Look at the gradients of a step, before anything is changed.

        Raises:
            RuntimeError: they are not as the level declares them.
        """
        scales = self._engine.step.has_loss_scale
        if not scales and not self._averages:
            return
        lacks = [f"is not scaled as {self._engine.level.name} asks"] * scales
        lacks += ["is not averaged over the processes"] * self._averages
        there = list(self._gradients(optimizer))
        direct = [names for *names, _ in there if names[0] in self._direct]
        if direct:
            raise RuntimeError(
                f"The gradient of {self._name(*direct[0])} comes from loss.backward(): it {' and '.join(lacks)}. In "
                "training_step, call self.manual_backward(loss) in its place."
            )
        passes, stepped = self._stepped.get(optimizer, (0, []))
        before = {id(grad) for one in stepped if (grad := one()) is not None}
        by_hand = [names for *names, grad in there if id(grad) not in before]
        if scales and by_hand and passes == self._passes:
            raise RuntimeError(
                f"The gradient of {self._name(*by_hand[0])} was written by hand: it {lacks[0]}, and this step would "
                "divide it by the loss scale. Call self.manual_backward(loss), or use a level without loss scaling."
            )

    @contextmanager
    def step_of(self, optimizer: Optimizer) -> Iterator[None]:
        """A step that the plugin makes, once ``check`` has found nothing."""
        self._in_step = True
        try:
            yield
        finally:
            self._in_step = False
        there = list(self._gradients(optimizer))
        for param, owner, _ in there:
            self._new.discard(param)
            self._new.discard(owner)
        self._stepped[optimizer] = self._passes, [ref(grad) for _, _, grad in there]

    def new_gradients(self) -> set[int]:
        """Ids of the module's parameters that have a gradient which no step has used."""
        return {id(owner) for param, owner, _ in self._gradients() if param in self._new or owner in self._new}

    def remove(self) -> None:
        """Remove the hooks and the marks."""
        self._hooks.close()
        for params in self._engine.columns.weights.gathered():
            for marks in (self._covered, self._direct, self._new):
                for param in params:
                    marks.discard(param)

    def _arrived(self, param: Tensor) -> None:
        self._new.add(param)
        if not self._announced:
            self._has_direct = True
            self._direct.add(param)

    def _before_step(self, optimizer: Optimizer, *_: Any) -> None:
        if not self._in_step:
            raise RuntimeError(
                f"{self._engine.level.name} scales the loss, and a step of torch's own {type(optimizer).__name__} "
                "would take the scaled gradients. Step with the optimizer that self.optimizers() returns."
            )

    def _gradients(self, optimizer: Optimizer | None = None) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """(parameter of the backward pass, parameter of the module, gradient) of every parameter with a gradient."""
        weights = self._engine.columns.weights
        waiting = weights.unreduced()
        mine = None if optimizer is None else {id(p) for group in optimizer.param_groups for p in group["params"]}
        for param, owner in weights.gathered():
            grad = waiting.get(id(owner), owner.grad)
            if grad is not None and (mine is None or id(owner) in mine):
                yield param, owner, grad

    def _name(self, *wanted: Tensor) -> str:
        """Name of a parameter, given sharded, gathered or both: the module has one of the two."""
        ids = {id(param) for param in wanted}
        return next((name for name, param in self._module.named_parameters() if id(param) in ids), "a parameter")

"""Gathers the weights of the outermost FSDP2 unit of a LightningModule once around a whole step.

With FSDP2's own ``register_fsdp_forward_method``, a step that calls ``forward``, which has hooks too, would free the
weights twice, and gather them once more for backward.
"""

from __future__ import annotations

import functools
from contextlib import ExitStack
from typing import Any

import lightning.pytorch as pl
from torch import nn
from torch.distributed.fsdp import FSDPModule

from nemo_lowprec.compat.distributed import FsdpUnit
from nemo_lowprec.engine import Engine
from nemo_lowprec.plugins.replaced import replace_attribute

_STEPS = ("training_step", "validation_step", "test_step", "predict_step")


def gather_around_steps(model: nn.Module, undo: ExitStack) -> None:
    """Gather the weights of ``model`` for each of Lightning's steps and for any other ``forward``.

    With manual optimization ``training_step`` is left out: a step contains its backward passes, and FSDP2 must see the
    output of ``forward`` before a backward pass. The model has its own steps again when ``undo`` is closed.
    """
    assert isinstance(model, FSDPModule) and isinstance(model, pl.LightningModule)
    unit = FsdpUnit(model)
    hooks = _Outermost(model, unit)
    unit.hook(hooks.before, hooks.after)
    undo.callback(unit.hook, unit.before, unit.after)
    for name in _STEPS if model.automatic_optimization else _STEPS[1:]:
        replace_attribute(undo, model, name, hooks.around(model, getattr(model, name)))


class _Outermost:
    """FSDP2's hooks before and after forward, for the outermost of nested calls only."""

    def __init__(self, model: nn.Module, unit: FsdpUnit) -> None:
        self._model, self._unit = model, unit
        self._depth = 0

    def before(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        self._depth += 1
        if self._depth > 1:
            return args, kwargs
        args, kwargs = self._unit.before(module, args, kwargs)
        engine = Engine.of(self._model)
        if engine is not None:
            engine.columns.weights.meet_root()
        return args, kwargs

    def after(self, module: nn.Module, args: Any, output: Any) -> Any:
        self._depth -= 1
        return output if self._depth else self._unit.after(module, args, output)

    def around(self, module: nn.Module, step: Any) -> Any:
        @functools.wraps(step)
        def gathered(*args: Any, **kwargs: Any) -> Any:
            self._depth = 0  # an exception may have ended an earlier step
            args, kwargs = self.before(module, args, kwargs)
            return self.after(module, args, step(*args, **kwargs))

        return gathered

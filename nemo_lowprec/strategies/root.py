"""The outermost unit of a sharded LightningModule: its weights are gathered around a whole step.

FSDP2's own ``register_fsdp_forward_method`` frees them twice where a step calls ``forward``, which is hooked too: they
would be gathered once more for backward.
"""

from __future__ import annotations

import functools
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule

from nemo_lowprec.engine import Engine

__all__ = ["gather_around_steps"]

_STEPS = ("training_step", "validation_step", "test_step", "predict_step")


def gather_around_steps(model: nn.Module) -> None:
    """Gather the weights of ``model`` for each of Lightning's steps, and for ``forward`` outside of them.

    With manual optimization ``training_step`` is left out: its backward passes lie inside, and FSDP2 must have seen
    the output of ``forward`` before them. Nothing is done where an earlier stage has done so.
    """
    if any(name in model.__dict__ for name in _STEPS):
        return
    assert isinstance(model, FSDPModule)
    state = model._get_fsdp_state()
    state._pre_forward_hook_handle.remove()
    state._post_forward_hook_handle.remove()
    hooks = _Outermost(model, state)
    state._pre_forward_hook_handle = model.register_forward_pre_hook(hooks.before, prepend=True, with_kwargs=True)
    state._post_forward_hook_handle = model.register_forward_hook(hooks.after)
    steps = _STEPS if getattr(model, "automatic_optimization", True) else _STEPS[1:]
    for name in steps:
        if callable(getattr(model, name, None)):
            setattr(model, name, hooks.around(model, getattr(model, name)))


class _Outermost:
    """FSDP2's hooks before and after forward, called for the outermost of nested calls only."""

    def __init__(self, model: nn.Module, state: Any) -> None:
        self._model, self._state = model, state
        self._depth = 0

    def before(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        self._depth += 1
        if self._depth > 1:
            return args, kwargs
        args, kwargs = self._state._pre_forward(module, args, kwargs)
        engine = Engine.of(self._model)
        if engine is not None:
            engine.columns.weights.meet_root()
        return args, kwargs

    def after(self, module: nn.Module, args: Any, output: Any) -> Any:
        self._depth -= 1
        return output if self._depth else self._state._post_forward(module, args, output)

    def around(self, module: nn.Module, step: Any) -> Any:
        @functools.wraps(step)
        def gathered(*args: Any, **kwargs: Any) -> Any:
            self._depth = 0  # an exception may have ended an earlier step
            args, kwargs = self.before(module, args, kwargs)
            return self.after(module, args, step(*args, **kwargs))

        return gathered

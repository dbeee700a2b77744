"""Optimizers that are made after their model was converted, as transformers' Trainer makes its own.

Such an optimizer would step on half copies, and hold states of no level. It gets its masters, or its low-bit states,
at its first step: a hook that torch calls before the step of every optimizer finds it.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

if TYPE_CHECKING:
    from nemo_lowprec.engine import Engine

_engines: WeakSet[Engine] = WeakSet()
_seen: WeakKeyDictionary[Optimizer, int] = WeakKeyDictionary()  # and the number of parameters that they had
_hooks: list[Any] = []


def watch_for_optimizers(engine: Engine) -> None:
    """Attach to ``engine`` whatever optimizer steps on a parameter of its model, from now on."""
    if not _hooks:
        _hooks.append(register_optimizer_step_pre_hook(_before_step))
    _engines.add(engine)
    _seen.clear()


def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
    count = sum(len(group["params"]) for group in optimizer.param_groups)
    if _seen.get(optimizer) == count:
        return None
    _seen[optimizer] = count
    engine = _engine_of(optimizer)
    if engine is None or optimizer in engine.optimizers:
        return None
    before = type(optimizer)
    engine.attach(optimizer)
    if engine.when_adopted is not None:
        engine.when_adopted(optimizer)
    if type(optimizer) is before:
        return None
    # The step that torch is about to run is the old class's: it gets an optimizer of nothing.
    with torch.no_grad():  # a wrapper of the step, too, which ``unwrap`` takes off
        result = inspect.unwrap(type(optimizer).step)(optimizer, *args[1:], **kwargs)
    return (torch.optim.AdamW([{"params": []}]), lambda: result), {}


def _engine_of(optimizer: Optimizer) -> Engine | None:
    held = {id(param) for group in optimizer.param_groups for param in group["params"]}
    for engine in list(_engines):
        model = engine.model
        if model is not None and engine.of(model) is engine and any(id(param) in held for param in _trained(model)):
            return engine
    return None


def _trained(model: nn.Module) -> Any:
    return (param for param in model.parameters() if param.requires_grad)

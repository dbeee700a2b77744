"""Attaches optimizers that are made after their model was converted, as transformers' Trainer does.

Such an optimizer would step on half copies, with FP32 states at every level. A hook that torch calls before the step of
every optimizer attaches the optimizer to the engine before its first step.
"""

from __future__ import annotations

import inspect
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

_engines: WeakSet[Any] = WeakSet()  # each an ``Engine``, whose file imports this one
_seen: WeakKeyDictionary[Optimizer, int] = WeakKeyDictionary()  # number of parameters when the hook saw the optimizer
_hooks: list[Any] = []


def watch_for_optimizers(engine: Any) -> None:
    """Attach every optimizer that steps on a parameter of the model of ``engine``, an ``Engine``, from now on."""
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
    # torch is about to run the step of the old class: that step gets an optimizer without parameters.
    with torch.no_grad():  # ``unwrap`` has taken off the step's own wrapper for no_grad
        result = inspect.unwrap(type(optimizer).step)(optimizer, *args[1:], **kwargs)
    empty = torch.optim.AdamW([{"params": []}])
    empty.param_groups.clear()
    return (empty, lambda: result), {}


def _engine_of(optimizer: Optimizer) -> Any:
    held = {id(param) for group in optimizer.param_groups for param in group["params"]}
    for engine in list(_engines):
        model = engine.model
        if model is None or engine.of(model) is not engine:
            continue
        if any(param.requires_grad and id(param) in held for param in model.parameters()):
            return engine
    return None

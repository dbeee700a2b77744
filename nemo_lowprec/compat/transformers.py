"""Modules of transformers and PEFT: models and experts of transformers, checkpointed layers, an adapter's input."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial, reduce
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

CHECKPOINT = "_gradient_checkpointing_func"  # the attribute of a layer that holds its checkpointing function
_SAVE = "save_pretrained"
_PLAIN_ARGUMENTS = {"use_reentrant", "preserve_rng_state"}


def is_checkpointed(module: nn.Module) -> bool:
    """Whether transformers recomputes the module's forward in backward."""
    own = module.__dict__
    return bool(own.get("gradient_checkpointing")) and CHECKPOINT in own and _may_checkpoint(type(module))


def _may_checkpoint(cls: type) -> bool:
    return any(base.__name__ == "GradientCheckpointingLayer" for base in cls.__mro__)


def is_plain_checkpoint(function: Callable[..., Any]) -> bool:
    """Whether a checkpointing function is torch's, and recomputes all of a forward pass."""
    return isinstance(function, partial) and function.func is checkpoint and {*function.keywords} <= _PLAIN_ARGUMENTS


def apply_gate(experts: nn.Module, projected: Tensor) -> Tensor:
    """The gated activation [rows, features] of the first projection [rows, 2 * features] of experts with gates."""
    return experts._apply_gate(projected)  # type: ignore[operator,no-any-return]


def is_expert_parallel(experts: nn.Module) -> bool:
    """Whether transformers has spread the experts over processes."""
    return bool(getattr(experts, "_is_expert_parallel", False))


def cast_to_adapter(layer: Any, x: Tensor, dtype: torch.dtype) -> Tensor:
    """The input of an adapter of PEFT's ``layer``, whose weights have this dtype."""
    return layer._cast_input_dtype(x, dtype)  # type: ignore[no-any-return]


def name_saved_dtypes(model: nn.Module) -> None:
    """Have ``save_pretrained`` of transformers' models in ``model`` name the dtype of the saved values.

    transformers writes the dtype of the first parameter into ``config.json``, to which ``from_pretrained`` rounds all.
    """
    for module in model.modules():
        if any(base.__name__ == "PreTrainedModel" for base in type(module).__mro__):
            module.__dict__[_SAVE] = partial(_save_pretrained, module)


def forget_saved_dtypes(model: nn.Module) -> None:
    """Undo ``name_saved_dtypes``."""
    for module in model.modules():
        own = module.__dict__.get(_SAVE)
        if isinstance(own, partial) and own.func is _save_pretrained:
            del module.__dict__[_SAVE]


def _save_pretrained(model: Any, *args: Any, **kwargs: Any) -> Any:
    cls = type(model)
    call = inspect.signature(cls.save_pretrained).bind(model, *args, **kwargs)
    if call.arguments.get("state_dict") is None:
        call.arguments["state_dict"] = model.state_dict()
    values = call.arguments["state_dict"].values()
    dtypes = [v.dtype for v in values if isinstance(v, Tensor) and v.is_floating_point()]
    widest = reduce(torch.promote_types, dtypes or [model.dtype])
    # transformers reads the property ``dtype``, which only a class can replace.
    model.__class__ = type(cls.__name__, (cls,), {"dtype": widest, "__module__": cls.__module__})
    try:
        return cls.save_pretrained(*call.args, **call.kwargs)
    finally:
        model.__class__ = cls

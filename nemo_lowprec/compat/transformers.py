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


def wrap_save_and_load(model: nn.Module) -> None:
    """Have models of transformers and PEFT in ``model`` keep the values that ``state_dict`` saves and loads.

    ``save_pretrained`` names the dtype of the saved values in ``config.json``: transformers names the dtype of the
    first parameter, to which ``from_pretrained`` rounds all. ``load_adapter`` leaves the parameters of an adapter that
    is there in the model: PEFT puts FP32 copies of half parameters in their places.
    """
    for module in model.modules():
        for base in type(module).__mro__:
            if base.__name__ in _METHODS:
                method = _METHODS[base.__name__]
                module.__dict__[method.__name__.lstrip("_")] = partial(method, module)


def unwrap_save_and_load(model: nn.Module) -> None:
    """Undo ``wrap_save_and_load``."""
    for module in model.modules():
        for name, own in list(module.__dict__.items()):
            if isinstance(own, partial) and own.func in _METHODS.values():
                del module.__dict__[name]


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


def _load_adapter(model: Any, *args: Any, **kwargs: Any) -> Any:
    cls = type(model)
    call = inspect.signature(cls.load_adapter).bind(model, *args, **kwargs)
    if call.arguments["adapter_name"] in model.peft_config:
        call.arguments["autocast_adapter_dtype"] = False
    return cls.load_adapter(*call.args, **call.kwargs)


_METHODS: dict[str, Callable[..., Any]] = {"PreTrainedModel": _save_pretrained, "PeftModel": _load_adapter}

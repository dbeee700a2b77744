"""Turns the user's Adam or AdamW into a low-bit optimizer and back, in place: the object and its groups stay."""

from __future__ import annotations

import inspect
from functools import lru_cache, wraps
from typing import Any
from weakref import ref

import torch
from torch import Tensor
from torch.optim import Optimizer

from nemo_lowprec.compat.modules import is_wrapped, mark_wrapped, note_step, patch_step
from nemo_lowprec.optim.adam import ORIGINAL, Adam, AdamW, LowBitStates
from nemo_lowprec.optim.reference import read
from nemo_lowprec.optim.storage import StateFormats
from nemo_lowprec.tensors.dtensor import as_dtensor_like, local_shard


def check_adoptable(optimizer: Optimizer) -> None:
    """Raise ValueError where ``adopt`` refuses ``optimizer``; changes nothing.

    Raises:
        ValueError: another optimizer than torch's Adam and AdamW, a subclass or an instance with a step of its own,
            amsgrad, differentiable, or complex parameters.
    """
    cls = type(optimizer)
    if not isinstance(optimizer, torch.optim.Adam):
        raise ValueError(
            f"{cls.__name__} has no low-bit form: the MS-AMP levels train with torch.optim.Adam or AdamW. "
            "Use one of these, or a level with FP32 states such as bf16_with_fp8_mixed."
        )
    if isinstance(optimizer, LowBitStates):
        raise ValueError(f"This {cls.__name__} holds low-bit states already.")
    for method in ("step", "_init_group"):
        plain = (getattr(base, method) for base in (torch.optim.Adam, torch.optim.AdamW))
        if inspect.unwrap(getattr(cls, method)) not in [inspect.unwrap(m) for m in plain]:
            raise ValueError(
                f"{cls.__name__} has a {method} of its own, which low-bit states would bypass. Use torch's AdamW."
            )
    own = optimizer.__dict__.get("step")
    if own is not None and not is_wrapped(own):
        raise ValueError(f"The step of this {cls.__name__} was replaced, which low-bit states would bypass.")
    for name in ("amsgrad", "differentiable"):
        if any(group[name] for group in optimizer.param_groups):
            raise ValueError(f"{cls.__name__} with {name}=True has no low-bit form. Use {name}=False.")
    for group in optimizer.param_groups:
        for param in group["params"]:
            if param.is_complex():
                raise ValueError(
                    f"{cls.__name__} has a complex parameter of shape {tuple(param.shape)}, which has no low-bit form. "
                    "Give complex parameters an optimizer of their own."
                )


@lru_cache(maxsize=32)
def _class_for(cls: type[Optimizer]) -> type[Optimizer]:
    if cls is torch.optim.AdamW:  # before Adam, the base class of AdamW
        return AdamW
    if cls is torch.optim.Adam:
        return Adam
    reduce = lambda self, protocol: (_unpickle, (cls,), self.__getstate__())  # noqa: E731
    return type(cls.__name__, (LowBitStates, cls), {"__module__": cls.__module__, "__reduce_ex__": reduce})


def _unpickle(cls: type[Optimizer]) -> Optimizer:
    """An adopted optimizer of the user's own class, which pickle would look for in the class's module."""
    made = _class_for(cls)  # type: ignore[arg-type]
    return made.__new__(made)


def adopt(optimizer: Optimizer, formats: StateFormats, gradient_release: bool = False) -> None:
    """Make ``optimizer`` hold its states in ``formats``. Groups, schedulers and hooks keep the same optimizer object.

    Args:
        gradient_release: whether parameters step in backward, so that GradScaler could not skip a step.

    Raises:
        ValueError: see ``check_adoptable``.
    """
    check_adoptable(optimizer)
    optimizer.__dict__[ORIGINAL] = type(optimizer)
    optimizer.__class__ = _class_for(type(optimizer))  # type: ignore[arg-type]
    patch_step(optimizer)
    _rewrap_step(optimizer)
    assert isinstance(optimizer, LowBitStates)
    optimizer._setup(formats, gradient_release)
    for param, state in optimizer.state.items():
        for name, value in state.items():
            if isinstance(value, Tensor):
                state[name] = optimizer._take(name, value, param)


def release(optimizer: Optimizer) -> None:
    """Give an adopted optimizer its own class back, and FP32 states."""
    original = optimizer.__dict__.pop(ORIGINAL, None)
    if original is None:
        return
    optimizer.__class__ = original
    _rewrap_step(optimizer)
    for name in ("formats", "_fused", "_places", "_gradient_release", "_written"):
        optimizer.__dict__.pop(name, None)
    fused = any(group["fused"] or group["capturable"] for group in optimizer.param_groups)
    for state in optimizer.state.values():
        state.pop("master_weight", None)
        for name, value in state.items():
            if name != "step":
                state[name] = as_dtensor_like(read(local_shard(value)), value)
            elif not fused:
                state[name] = value.cpu()


def _rewrap_step(optimizer: Optimizer) -> None:
    """Make a scheduler's wrapper around ``step``, which holds the old class's function, call the new class's."""
    wrapper = optimizer.__dict__.get("step")
    if wrapper is None:
        return
    held = ref(optimizer)
    function: Any = type(optimizer).step

    @wraps(function)
    def step(*args: Any, **kwargs: Any) -> Any:
        found = held()
        assert found is not None
        note_step(found)
        return function(found, *args, **kwargs)

    mark_wrapped(step)
    optimizer.step = step  # type: ignore[method-assign]

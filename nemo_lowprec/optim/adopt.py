"""Turns the user's optimizer into a low-bit one and back, in place: the object and its groups stay."""

from __future__ import annotations

import inspect
from functools import lru_cache, wraps
from typing import Any
from weakref import ref

import torch
from torch import Tensor
from torch.optim import Optimizer

from nemo_lowprec.compat.modules import is_wrapped, mark_wrapped, note_step, patch_step
from nemo_lowprec.optim.adam import Adam, AdamStates, AdamW
from nemo_lowprec.optim.lion import Lion
from nemo_lowprec.optim.low_bit import ORIGINAL, ORIGINAL_FORMATS, LowBitStates, count_unless_counted
from nemo_lowprec.optim.muon import Muon, MuonStates, TorchMuon, check_matrices
from nemo_lowprec.optim.reference import read
from nemo_lowprec.optim.sgd import SGD, SgdStates
from nemo_lowprec.optim.storage import StateFormats
from nemo_lowprec.tensors.dtensor import as_dtensor_like, local_shard

# The bases of low-bit optimizers, by torch's classes; a subclass of the user's takes torch's step.
_BASES: dict[type[Optimizer], type[LowBitStates]] = {
    torch.optim.Adam: AdamStates, torch.optim.SGD: SgdStates, torch.optim.Muon: MuonStates,
}  # fmt: skip
_CLASSES: dict[type[Optimizer], type[LowBitStates]] = {
    torch.optim.Adam: Adam, torch.optim.AdamW: AdamW, torch.optim.SGD: SGD, torch.optim.Muon: TorchMuon,
}  # fmt: skip
_OWN = (Lion, Muon)  # which hold states in FP32 until they are adopted


def check_adoptable(optimizer: Optimizer) -> None:
    """Raise ValueError where ``adopt`` refuses ``optimizer``; changes nothing.

    Raises:
        ValueError: another optimizer than torch's Adam, AdamW, SGD and Muon and this package's Lion and Muon; a
            subclass or an instance with a step of its own; amsgrad, differentiable, complex parameters, or a Muon group
            with a parameter that is no matrix.
    """
    cls = type(optimizer)
    if isinstance(optimizer, LowBitStates):
        if ORIGINAL in optimizer.__dict__ or not isinstance(optimizer, _OWN) or not _holds_fp32(optimizer):
            raise ValueError(
                f"This {cls.__name__} holds low-bit states already. Make one of torch's, which gets them here."
            )
        base: type[Optimizer] = next(own for own in _OWN if isinstance(optimizer, own))
        methods: tuple[str, ...] = ("step", "rule")
    elif (found := _torchs(cls)) is not None:
        base, methods = found, ("step", "_init_group")
    else:
        raise ValueError(
            f"{cls.__name__} has no low-bit form: the MS-AMP levels train with torch.optim.Adam, AdamW, SGD or Muon, "
            "or with nemo_lowprec.optim.Lion or Muon. Use one of these, or a level with FP32 states such as "
            "bf16_with_fp8_mixed."
        )
    plain = [base, torch.optim.AdamW] if base is torch.optim.Adam else [base]
    for method in methods:
        if inspect.unwrap(getattr(cls, method)) not in [inspect.unwrap(getattr(one, method)) for one in plain]:
            raise ValueError(
                f"{cls.__name__} has a {method} of its own, which low-bit states would bypass. Use torch's "
                f"{plain[-1].__name__}."
            )
    own = optimizer.__dict__.get("step")
    if own is not None and not is_wrapped(own):
        raise ValueError(
            f"The step of this {cls.__name__} was replaced, which low-bit states would bypass. Prepare the optimizer "
            "with its model, before other code such as accelerator.prepare wraps it."
        )
    for name in ("amsgrad", "differentiable"):
        if any(group.get(name) for group in optimizer.param_groups):
            raise ValueError(f"{cls.__name__} with {name}=True has no low-bit form. Use {name}=False.")
    for group in optimizer.param_groups:
        for param in group["params"]:
            if param.is_complex():
                raise ValueError(
                    f"{cls.__name__} has a complex parameter of shape {tuple(param.shape)}, which has no low-bit form. "
                    "Give complex parameters an optimizer of their own."
                )
        if base is Muon or base is torch.optim.Muon:
            check_matrices(group)


def _torchs(cls: type[Optimizer]) -> type[Optimizer] | None:
    """The class of torch's, with a low-bit form, of which ``cls`` is a subclass."""
    return next((base for base in _BASES if issubclass(cls, base)), None)


def _holds_fp32(optimizer: LowBitStates) -> bool:
    formats = optimizer.formats
    return (formats.exp_avg, formats.exp_avg_sq, formats.master_weight) == ("fp32", "fp32", None)


@lru_cache(maxsize=32)
def _class_for(cls: type[Optimizer]) -> type[Optimizer]:
    if cls in _CLASSES:
        return _CLASSES[cls]
    base = _torchs(cls)
    if base is None:  # of this package
        return cls
    reduce = lambda self, protocol: (_unpickle, (cls,), self.__getstate__())  # noqa: E731
    return type(cls.__name__, (_BASES[base], cls), {"__module__": cls.__module__, "__reduce_ex__": reduce})


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
    if isinstance(optimizer, LowBitStates):
        optimizer.__dict__[ORIGINAL_FORMATS] = optimizer.formats
    optimizer.__class__ = _class_for(type(optimizer))  # type: ignore[arg-type]
    patch_step(optimizer)
    _rewrap_step(optimizer)
    assert isinstance(optimizer, LowBitStates)
    optimizer._setup(formats, gradient_release)
    for param, state in optimizer.state.items():
        for name, value in state.items():
            if isinstance(value, Tensor):
                state[name] = optimizer._take(name, value, param)
        count_unless_counted(param, state)


def release(optimizer: Optimizer) -> None:
    """Give an adopted optimizer its own class back, and FP32 states."""
    original = optimizer.__dict__.pop(ORIGINAL, None)
    if original is None:
        return
    optimizer.__class__ = original
    _rewrap_step(optimizer)
    for name in ("formats", "_fused", "_places", "_gradient_release", "_written"):
        optimizer.__dict__.pop(name, None)
    formats = optimizer.__dict__.pop(ORIGINAL_FORMATS, None)
    if isinstance(optimizer, LowBitStates):
        optimizer._setup(formats)
    on_device = isinstance(optimizer, LowBitStates) or any(
        group.get("fused") or group.get("capturable") for group in optimizer.param_groups
    )
    for state in optimizer.state.values():
        state.pop("master_weight", None)
        for name, value in state.items():
            if name != "step":
                state[name] = as_dtensor_like(read(local_shard(value)), value)
            elif not on_device:
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

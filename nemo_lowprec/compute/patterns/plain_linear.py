"""Subclasses of ``nn.Linear`` that compute x @ weight.T + bias, as transformers' ``FalconLinear`` does.

Such a class is recognised by what its forward computes, never by its name. A class with noise, an activation, an
adapter, quantized weights, another mode in training, or more than one argument is none.
"""

from __future__ import annotations

import copy
import inspect
from typing import Any, TypeGuard
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.nn.parameter import UninitializedParameter

from nemo_lowprec.compute.class_swap import NamedInput, derive
from nemo_lowprec.compute.patterns.pattern import probing, twin_of
from nemo_lowprec.tensors import QuantizedTensor

PLAIN = (nn.Linear, NonDynamicallyQuantizableLinear)  # the second one computes as the first

_INS, _OUTS = 32, 24  # of the probe
_SIZES = (1.0, 1e3, 1e-3)  # of its inputs: a clamp or an activation bends some of them
_VALUES = (bool, int, float, str, type(None))
_known: WeakKeyDictionary[type, dict[Any, bool]] = WeakKeyDictionary()  # outcomes by class, and by ``_key``
_DTYPES = {torch.float32: 1e-5, torch.bfloat16: 2e-2}  # of its inputs, with the relative error of sums in that dtype


def as_linear(cls: type[nn.Linear], module: nn.Module) -> type[nn.Module]:
    """``cls``, or for a module of a class of its own ``cls`` derived from that class, so that the module stays one."""
    own = type(module)
    if own in PLAIN:
        return cls
    made = derive(cls, own)
    return made if _input_name(own) == "input" else derive(NamedInput, made)


def is_linear(module: nn.Module | None) -> TypeGuard[nn.Linear]:
    """Whether ``module`` is an ``nn.Linear``, or of a subclass that computes as ``nn.Linear`` does."""
    if type(module) is nn.Linear:
        return True
    return isinstance(module, nn.Linear) and computes_linear(module)


def computes_linear(module: nn.Linear) -> bool:
    """Whether the forward of ``module``, of a subclass of ``nn.Linear``, returns x @ weight.T + bias.

    The class's forward runs on small random inputs, in a copy of the module with small random parameters, in training
    and in evaluation. Random states, parameters and attributes of the module stay as they are. Modules of one class
    whose attributes are equal are probed once.
    """
    own = type(module)
    if _input_name(own) is None or {*module._parameters} != {"weight", "bias"} or module._buffers:
        return False
    if any(child is not None for child in module._modules.values()) or own.__call__ is not nn.Module.__call__:
        return False
    if hasattr(own, "weight") or hasattr(own, "bias"):  # computed by a property
        return False
    for param in module._parameters.values():
        plain = param is None or type(param) is nn.Parameter or isinstance(param, QuantizedTensor)
        if not plain or isinstance(param, UninitializedParameter):
            return False
    if own.forward is nn.Linear.forward:
        return True
    key = _key(module)
    known = _known.setdefault(own, {})
    if key is None:
        return _probe(module)
    if key not in known:
        known[key] = _probe(module)
    return known[key]


def _key(module: nn.Linear) -> Any:
    """What the outcome of a probe depends on, beside the class; None where an attribute is no plain value."""
    attributes = _own_attributes(module)
    if not all(type(value) in _VALUES for value in attributes.values()):
        return None
    return type(module).forward, module._parameters["bias"] is None, tuple(sorted(attributes.items(), key=str))


def _own_attributes(module: nn.Module) -> dict[str, Any]:
    left_out = ("training", "in_features", "out_features")
    return {name: value for name, value in module.__dict__.items() if not name.startswith("_") and name not in left_out}


@probing()
def _probe(module: nn.Linear) -> bool:
    generator = torch.Generator().manual_seed(0)
    biased = module._parameters["bias"] is not None
    try:
        return all(
            _is_formula(module, biased, training, dtype, size, generator)
            for training in (False, True)
            for dtype in _DTYPES
            for size in _SIZES
        )
    except Exception:  # any failure means: another function
        return False


def _input_name(cls: type) -> str | None:
    """The name of the only argument of the class's forward; None where it takes others."""
    try:
        _, *arguments = inspect.signature(cls.forward).parameters.values()  # type: ignore[attr-defined]
    except (TypeError, ValueError):
        return None
    names = [argument.name for argument in arguments if argument.kind is argument.POSITIONAL_OR_KEYWORD]
    return names[0] if len(names) == len(arguments) == 1 else None


def _is_formula(
    module: nn.Linear, biased: bool, training: bool, dtype: torch.dtype, size: float, generator: torch.Generator
) -> bool:
    """Whether gradients and outputs, of two and three dimensions, are the formula's."""

    def random(*shape: int, of: float = 1.0) -> Tensor:
        return (torch.randn(*shape, generator=generator, dtype=torch.float32, device="cpu") * of).to(dtype)

    values = {"weight": random(_OUTS, _INS)} | ({"bias": random(_OUTS, of=size)} if biased else {})
    twin = _twin(module, values, training)
    for shape in ((5, _INS), (2, 3, _INS)):
        x = random(*shape, of=size).requires_grad_()
        dy = random(*shape[:-1], _OUTS)
        got: Any = type(module).forward(twin, x)  # type: ignore[arg-type]
        weight, bias = twin._parameters["weight"], twin._parameters["bias"]
        want = F.linear(x, weight, bias)  # type: ignore[arg-type]
        if type(got) is not Tensor or got.shape != want.shape or got.dtype != want.dtype or not got.requires_grad:
            return False
        leaves = [leaf for leaf in (x, weight, bias) if leaf is not None]
        found = [got, *torch.autograd.grad(got, leaves, dy, allow_unused=True)]
        wanted = [want, *torch.autograd.grad(want, leaves, dy)]
        if not all(_close(a, b, _DTYPES[dtype]) for a, b in zip(found, wanted, strict=True)):
            return False
    return True


def _close(got: Tensor | None, want: Tensor, rtol: float) -> bool:
    return got is not None and bool((got.float() - want.float()).abs().max() <= rtol * want.float().abs().max())


def _twin(module: nn.Linear, values: dict[str, Tensor], training: bool) -> nn.Module:
    """A copy of ``module`` with the parameters ``values``, which shares nothing that its forward could write."""
    twin = twin_of(module, values)
    state = twin.__dict__
    state.update(copy.deepcopy(_own_attributes(module)))
    state.update(training=training, in_features=_INS, out_features=_OUTS)
    return twin

"""Gives a module another class and a few attributes, and takes both back exactly.

The module object stays: parents, parameters, hooks and names go on pointing at it. ``own_forward`` and
``dtype_obstacle`` say why a module cannot take another class.
"""

from __future__ import annotations

import copyreg
from abc import ABCMeta
from typing import Any

import torch
from torch import Tensor, nn

_ORIGINAL = "_lowprec_original"  # on a converted module: (its class, earlier values of attributes, the new class)


class _ABSENT:
    """The value of an attribute that was not there; a class, since copies and pickles of a module keep its identity."""


def swap(module: nn.Module, cls: type[nn.Module], **attributes: Any) -> None:
    """Make ``module`` an instance of ``cls`` with these attributes. ``revert_layers`` undoes all swaps of a module."""
    original, earlier, _ = module.__dict__.get(_ORIGINAL, (type(module), {}, None))
    before = {name: module.__dict__.get(name, _ABSENT) for name in attributes}
    # Through __dict__: nn.Module.__setattr__ would register modules and parameters among the attributes.
    module.__dict__.update(attributes)
    module.__dict__[_ORIGINAL] = (original, {**before, **earlier}, cls)
    module.__class__ = cls


class _Derived(type):
    """The classes that ``derive`` makes; they have no names in a module."""


class _DerivedAbstract(_Derived, ABCMeta):
    """The metaclass of a derived class whose base is an abstract base class, as PEFT's layers are."""


_derived: dict[Any, Any] = {}


def derive(first: type[nn.Module], second: type[nn.Module]) -> type[nn.Module]:
    """The class with the bases ``first`` and ``second``, which a module of the class ``second`` can take.

    The module stays an instance of its own class; ``super().forward`` in ``first`` is the module's own forward.
    """
    if (first, second) not in _derived:
        state = {"__module__": first.__module__, "__doc__": first.__doc__}
        kind = _DerivedAbstract if isinstance(second, ABCMeta) else _Derived
        _derived[first, second] = kind(f"{first.__name__}Of{second.__name__}", (first, second), state)
    return _derived[first, second]  # type: ignore[no-any-return]


class NamedInput(nn.Module):
    """Takes the input of a module under any name; ``derive`` puts it before a class that knows the input by another."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return super().forward(*args, *kwargs.values())  # type: ignore[misc]


def kind_of(module: Any) -> type:
    """The class that computes ``module``: for a class that ``derive`` has made the first of the two."""
    cls = type(module)
    while isinstance(cls, _Derived):
        first, second = cls.__bases__
        cls = second if first is NamedInput else first
    return cls


def own_class(module: nn.Module) -> type[nn.Module]:
    """The class that ``module`` has unconverted, which its user knows."""
    return module.__dict__.get(_ORIGINAL, (type(module),))[0]  # type: ignore[no-any-return]


def _pickled(cls: Any) -> Any:
    return derive, cls.__bases__


copyreg.pickle(_Derived, _pickled)
copyreg.pickle(_DerivedAbstract, _pickled)


def is_swapped(module: nn.Module) -> bool:
    """Whether ``module`` itself is converted."""
    return _ORIGINAL in module.__dict__


def is_converted(model: nn.Module) -> bool:
    """Whether any module of ``model`` is converted."""
    return any(map(is_swapped, model.modules()))


def revert_layers(model: nn.Module) -> None:
    """Give every converted module of ``model`` its own class and attributes back."""
    for module in model.modules():
        if _ORIGINAL in module.__dict__:
            original, before, ours = module.__dict__.pop(_ORIGINAL)
            for name, value in before.items():
                if value is _ABSENT:
                    del module.__dict__[name]
                else:
                    module.__dict__[name] = value
            module.__class__ = _rebased(type(module), ours, original)


def _rebased(cls: type[nn.Module], ours: type[nn.Module], original: type[nn.Module]) -> type[nn.Module]:
    """``cls``, which a parametrization or FSDP2 has derived from ``ours``, derived from ``original`` instead."""
    if not issubclass(cls, ours):
        return cls
    if cls is ours:
        return original
    bases = tuple(_rebased(base, ours, original) for base in cls.__bases__)
    inherited = ("__dict__", "__weakref__")
    return type(cls.__name__, bases, {name: v for name, v in vars(cls).items() if name not in inherited})


def own_forward(module: nn.Module) -> str | None:
    """The reason to leave a module alone whose forward is not its class's; None for any other module."""
    return f"{type(module).__name__} has a forward of its own" if "forward" in module.__dict__ else None


def dtype_obstacle(weight: Tensor) -> str | None:
    """The reason to leave a layer with this weight alone; None for FP32 and half weights."""
    if weight.dtype in (torch.float32, torch.float16, torch.bfloat16):
        return None
    return f"its weight is {str(weight.dtype).removeprefix('torch.')}"

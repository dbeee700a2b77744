"""The protocol of a pattern, and the probe by which a pattern recognises a module."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from nemo_lowprec.compat.tensors import without_dispatch_modes
from nemo_lowprec.compute.backends.base import Backend


@dataclass(frozen=True)
class Match:
    """What a pattern has found out about a module that it can compute. Names are relative to the module.

    Attributes:
        linears: names of the linear layers whose GEMMs the pattern runs, as ``Conversion.low`` has them.
        beside: names of linear layers one of which at least must be converted, for a pattern that runs no GEMM itself.
        norms: names of the norms that the pattern computes; ``""`` is the module itself.
        settings: anything that ``apply`` needs.
    """

    linears: tuple[str, ...] = ()
    beside: tuple[str, ...] = ()
    norms: tuple[str, ...] = ()
    settings: dict[str, Any] = field(default_factory=dict)


class Pattern(ABC):
    """Recognises modules by what they compute, and computes them in another way from the same parameters.

    Attributes:
        name: shown in the table of layers where ``is_parent``.
        is_parent: whether the modules hold linear layers. A parent is fused on top of its converted linear layers; a
            module without linear layers (a norm) is a layer, which users choose by name.
        is_listed: whether ``Conversion`` lists the modules, and ``convert`` chooses among them. Of the others users
            name in ``skip`` those that are to be left alone.
        needs_histories: whether the pattern computes with delayed scaling only.
    """

    name: str
    is_parent: bool = True
    is_listed: bool = True
    needs_histories: bool = False

    @abstractmethod
    def is_candidate(self, module: nn.Module) -> bool:
        """Whether to look at ``module`` at all, by its class or its children's names; reads no values."""

    @abstractmethod
    def recognise(self, module: nn.Module) -> Match | str:
        """The match, or why the pattern cannot compute ``module``. Changes nothing; no layer is converted yet."""

    def pays(self, match: Match, backend: Backend) -> bool:
        """Whether ``backend`` computes the module of ``match`` faster so."""
        return True

    @abstractmethod
    def apply(self, module: nn.Module, match: Match, backend: Backend) -> None:
        """Give ``module`` a class with another forward, by ``swap``; the linear layers of ``match`` are converted."""


@contextmanager
def probing() -> Iterator[None]:
    """Context in which a pattern runs a module: on real values, with gradients, and leaving no trace."""
    with (
        without_dispatch_modes(),
        torch.inference_mode(False),
        torch.enable_grad(),
        torch.random.fork_rng(devices=[]),
        torch.autocast("cpu", enabled=False),
    ):
        yield


def run_with(module: nn.Module, parameters: dict[str, Tensor], *inputs: Tensor) -> Tensor | None:
    """Run the forward of ``module`` in evaluation with other parameters, and without hooks; ``module`` stays as it is.

    Args:
        parameters: by the names in ``module.named_parameters()``, all of them. Shapes may be smaller than the module's.

    Returns:
        The output; None where the module has other parameters, fails, or returns anything but a tensor.
    """
    names = [name for name, _ in module.named_parameters(remove_duplicate=False)]
    if sorted(names) != sorted(parameters):
        return None
    try:
        twin = twin_of(module, parameters)
        with torch.no_grad(), torch.autocast(inputs[0].device.type, enabled=False):
            out = type(module).forward(twin, *inputs)
    except Exception:  # any failure means: another function
        return None
    return out if isinstance(out, Tensor) else None


def twin_of(module: nn.Module, parameters: dict[str, Tensor], prefix: str = "") -> nn.Module:
    """A copy of ``module`` with other ``parameters``, in evaluation, that shares all but submodules and hooks."""
    twin = copy.copy(module)
    state = twin.__dict__
    state.update({name: type(value)() for name, value in state.items() if name.endswith("_hooks")})
    state["training"] = False
    state["_parameters"] = {
        name: param if param is None else nn.Parameter(parameters[prefix + name])
        for name, param in module._parameters.items()
    }
    state["_modules"] = {
        name: child if child is None else twin_of(child, parameters, f"{prefix}{name}.")
        for name, child in module._modules.items()
    }
    return twin

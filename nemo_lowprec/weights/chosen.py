"""Some parameters of a model, found again before every forward pass without a walk through all modules."""

from __future__ import annotations

from collections.abc import Callable
from weakref import ReferenceType, ref

from torch import nn


class ChosenParams:
    """The parameters of a model that satisfy a condition.

    Modules are held weakly, and parameters by name: a parameter that the model has replaced is not kept alive.

    Args:
        wanted: the condition. Call ``renew`` where a parameter satisfies it that did not before.
    """

    def __init__(self, wanted: Callable[[nn.Parameter], bool]) -> None:
        self._wanted = wanted
        self._places: list[tuple[ReferenceType[nn.Module], str]] | None = None

    def renew(self) -> None:
        """Walk through the model at the next ``of``."""
        self._places = None

    def of(self, model: nn.Module) -> list[tuple[nn.Module, nn.Parameter]]:
        """(module, parameter) of each parameter of ``model`` that satisfies the condition, once."""
        found = self._look()
        if found is None:
            places: dict[int, tuple[ReferenceType[nn.Module], str]] = {}
            for module in model.modules():
                for name, param in module._parameters.items():
                    if param is not None and self._wanted(param):
                        places.setdefault(id(param), (ref(module), name))
            self._places = list(places.values())
            found = self._look()
        assert found is not None
        return found

    def _look(self) -> list[tuple[nn.Module, nn.Parameter]] | None:
        """The parameters at the known places; None where one was replaced, or satisfies the condition no more."""
        if self._places is None:
            return None
        found = []
        for held, name in self._places:
            module = held()
            param = module._parameters.get(name) if module is not None else None
            if module is None or param is None or not self._wanted(param):
                return None
            found.append((module, param))
        return found

"""Finds the routers of a model, and how many of its experts a token passes.

Experts are a module that ``layout_of`` knows, or the children of a ``ModuleList`` or ``ModuleDict``. A router stands
beside the experts, and has a matrix with a row for each expert.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from torch import nn

from nemo_lowprec.compute.experts.layout import layout_of
from nemo_lowprec.compute.filters import full_name

_CHOSEN = ("top_k", "num_experts_per_tok", "num_selected_experts", "moe_topk", "moe_k", "topk", "k")
_NAMES = ("router", "gate", "wg")  # in the name of a router


class ExpertsBlock(NamedTuple):
    """A module that holds experts and their router.

    Attributes:
        experts: name of the module that holds the experts.
        routers: names of the modules in which a router's matrices lie, as the model's.
        share: the part of the experts that a token passes; 1 where nothing says it.
    """

    experts: str
    routers: tuple[str, ...]
    share: float


def blocks_of(model: nn.Module) -> list[ExpertsBlock]:
    """The blocks of ``model`` with experts and a router."""
    return [block for name, module in model.named_modules() for block in _blocks_in(name, module)]


def _blocks_in(name: str, parent: nn.Module) -> Iterator[ExpertsBlock]:
    for own, child in parent.named_children():
        count = _number_of(child)
        if count is None:
            continue
        stacked = layout_of(child) is not None
        routers = {
            full_name(name, full_name(other, path)): module
            for other, beside in parent.named_children()
            if beside is not child
            for path, module in _routers_in(other, beside, count, stacked)
        }
        if routers or stacked:
            holders = [*routers.values(), child, parent, *_parents(routers, parent, name)]
            yield ExpertsBlock(full_name(name, own), tuple(routers), _share(holders, count))


def _number_of(module: nn.Module) -> int | None:
    """The number of experts in ``module``; None where it holds none."""
    if layout_of(module) is not None:
        return int(module.num_experts)  # type: ignore[arg-type]
    if isinstance(module, nn.ModuleList | nn.ModuleDict) and len(module) > 1:
        children = list(module.children())
        return len(children) if len({type(child) for child in children}) == 1 else None
    return None


def _routers_in(name: str, beside: nn.Module, experts: int, alone: bool) -> list[tuple[str, nn.Module]]:
    """(path, module) of the modules inside of ``beside`` that have a router's matrix.

    Args:
        alone: whether a module whose only matrix it is needs no name of a router.
    """
    matrices = [
        (path, module, param)
        for path, module in beside.named_modules()
        for param in module._parameters.values()
        if param is not None and param.dim() == 2 and not isinstance(module, nn.Embedding)
    ]
    found = [(path, module) for path, module, param in matrices if len(param) == experts]
    called = any(part in name.lower() or part in type(beside).__name__.lower() for part in _NAMES)
    return found if called or (alone and len(found) == len(matrices) == 1) else []


def _parents(routers: dict[str, nn.Module], parent: nn.Module, name: str) -> list[nn.Module]:
    """The modules between a router's matrix and ``parent``: a router may hold a linear layer, and know ``top_k``."""
    paths = [router.removeprefix(f"{name}.").split(".") for router in routers]
    return [parent.get_submodule(path[0]) for path in paths if len(path) > 1]


def _share(holders: list[nn.Module], experts: int) -> float:
    for holder in holders:
        for source in (holder, getattr(holder, "config", None)):
            for name in _CHOSEN:
                chosen: Any = getattr(source, name, None)
                if isinstance(chosen, int) and not isinstance(chosen, bool) and 0 < chosen <= experts:
                    return chosen / experts
    return 1.0

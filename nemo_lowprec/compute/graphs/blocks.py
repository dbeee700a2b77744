"""Finds what may run as one CUDA graph: the blocks of a model, which are repeated modules, and the modules around."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from torch import nn

_CONTAINERS = (nn.ModuleList, nn.Sequential)


def find_blocks(model: nn.Module) -> dict[str, nn.Module]:
    """The blocks of ``model``, by name: the children of the outermost containers whose children are of one class.

    A container is an ``nn.ModuleList`` or an ``nn.Sequential`` with two children or more of its most frequent class. A
    block has a linear layer, and no block is inside of another one.
    """
    found: dict[str, nn.Module] = {}
    taken: set[int] = set()
    for name, module in model.named_modules():
        if id(module) in taken or not isinstance(module, _CONTAINERS):
            continue
        kinds = Counter(type(child) for child in module.children())
        kind, count = kinds.most_common(1)[0] if kinds else (None, 0)
        blocks = {n: child for n, child in module.named_children() if type(child) is kind and _has_linear(child)}
        if count < 2 or len(blocks) < 2:
            continue
        for own, block in blocks.items():
            taken.update(map(id, block.modules()))
            found[f"{name}.{own}" if name else own] = block
    return found


def find_wholes(model: nn.Module, blocks: Iterable[str]) -> dict[str, nn.Module]:
    """The modules of ``model`` with a forward that hold ``blocks``, by name, the outermost first.

    A LightningModule is none: its forward may log.
    """
    around = {name[:end] for name in blocks for end in [0, *(i for i, c in enumerate(name) if c == ".")]}
    return {
        name: module
        for name, module in model.named_modules()
        if name in around
        and type(module).forward is not nn.Module.forward
        and not any(cls.__name__ == "LightningModule" for cls in type(module).__mro__)
    }


def _has_linear(module: nn.Module) -> bool:
    return not isinstance(module, nn.Linear) and any(isinstance(m, nn.Linear) for m in module.modules())

"""Linear layers that nobody calls: the module that holds such a layer multiplies with its weight itself.

Examples are the attention pooling of OpenAI's CLIP, which hands the weights to ``F.multi_head_attention_forward``, and
Mamba, which multiplies with ``self.dt_proj.weight``. Conversion would change nothing there.

The source of the module's class shows which layers are never called. Where one method calls a layer and another one
reads its weight, as Jamba and the fused kernels of Mamba 2 do, the first training step shows it.
"""

from __future__ import annotations

import ast
import functools
import inspect
from collections.abc import Iterator
from types import CodeType
from typing import Any

from torch import nn

from nemo_lowprec.compute.multihead import LowPrecisionMultiheadAttention
from nemo_lowprec.compute.written import methods_in_passes

# Attributes of a weight that tell nothing of its values.
_NO_VALUES = ("dtype", "device", "shape", "ndim", "dim", "size", "numel", "requires_grad", "is_cuda")

_CHILDREN = ("children", "modules", "named_children", "named_modules", "_modules")


def unread(model: nn.Module) -> dict[int, str]:
    """The reason to leave a linear layer of ``model`` alone that is not called, by the layer's id."""
    found = {}
    for module in model.modules():
        kind = _class_of(module)
        if isinstance(module, nn.MultiheadAttention):
            if not isinstance(module, LowPrecisionMultiheadAttention):
                found[id(module.out_proj)] = f"{kind.__name__} may read its weight without calling it"
            continue
        for name, child in module._modules.items():
            if isinstance(child, nn.Linear):
                uses = _all_uses(kind, name)
                if "weight" in uses and "other" not in uses:
                    found[id(child)] = f"{kind.__name__} reads its weight without calling it"
    return found


def doubtful(model: nn.Module) -> dict[int, str]:
    """The class of the module that holds a linear layer, and calls the layer or reads its weight, by the layer's id."""
    return {
        id(child): type(module).__name__
        for module in model.modules()
        for name, child in module._modules.items()
        if isinstance(child, nn.Linear) and "weight" in _all_uses(_class_of(module), name)
    }


def _class_of(module: nn.Module) -> Any:
    return type(module)


@functools.cache
def _all_uses(cls: Any, name: str) -> set[str]:
    """What the methods of ``cls`` do with ``self.<name>``, a layer: see ``_uses``. The source tells; none, nothing."""
    bases = [base for base in cls.__mro__ if base not in (nn.Module, object)]
    # Reading the source takes long, and the compiled code has the names, too.
    if not any({name, "weight"} <= set(code.co_names) for base in bases for code in _codes(base)):
        return set()
    return {use for base in bases for method in methods_in_passes(base) or () for use in _uses(method, name)}


def _uses(method: Any, name: str) -> Iterator[str]:
    """What a method does with ``self.<name>``: ``weight``, it reads the weight's values; ``aside``, it reads anything
    else of a linear layer; ``other``, it may call the layer.
    """
    arguments = [*method.args.posonlyargs, *method.args.args]
    own = arguments[0].arg if arguments else ""
    nodes = list(ast.walk(method))
    behind = {id(node.value): node for node in nodes if isinstance(node, ast.Attribute)}
    for node in nodes:
        if isinstance(node, ast.Name) and node.id == own and id(node) not in behind:
            yield "other"  # handed to a function, getattr for example
        if not isinstance(node, ast.Attribute) or not isinstance(node.value, ast.Name) or node.value.id != own:
            continue
        if node.attr in _CHILDREN:
            yield "other"
        elif node.attr == name:
            read = behind.get(id(node))
            if read is None or read.attr not in ("weight", "bias", "in_features", "out_features"):
                yield "other"
            else:
                of_weight = behind.get(id(read))
                values = read.attr == "weight" and (of_weight is None or of_weight.attr not in _NO_VALUES)
                yield "weight" if values else "aside"


def _codes(cls: Any) -> Iterator[CodeType]:
    """The compiled code of the methods of ``cls`` itself."""
    for method in vars(cls).values():
        function = inspect.unwrap(method) if inspect.isfunction(method) else None
        if inspect.isfunction(function):
            yield function.__code__

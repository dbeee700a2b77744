"""The parameters that modules read by themselves, in a compiled graph.

A converted linear layer hands its parameters to operators. Other modules read theirs as attributes: norms, embeddings,
convolutions, a class token, a table of position biases, the factors of a residual branch. Dynamo takes no parameter in
low-bit storage and none with a gradient of another dtype, and ends its graph there. So a module gets a class in which
these parameters are properties, which hand out the values that a ``GraphEntry`` reads where a graph is traced. A
parameter that the module may write stays as it is: the write would be lost.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from nemo_lowprec.compute.class_swap import swap
from nemo_lowprec.compute.compiled import read_parameter
from nemo_lowprec.compute.embedding import LowPrecisionEmbedding
from nemo_lowprec.compute.graph_entry import GraphEntry
from nemo_lowprec.compute.written import may_write
from nemo_lowprec.tensors.gradient import computed_dtype, gradient_dtype

_classes: dict[tuple[type[nn.Module], tuple[str, ...]], type[nn.Module]] = {}


def show_own_parameters(model: nn.Module) -> None:
    """Let compiled graphs read the parameters of all modules of ``model`` that have no GEMM plan."""
    for module in model.modules():
        if "gemm_plan" in module.__dict__ or "gemm_plans" in module.__dict__:
            continue
        if getattr(module, "max_norm", None) is not None:  # an embedding that writes its table in each pass
            continue
        cls = type(module)
        names = tuple(n for n, p in module._parameters.items() if p is not None and not hasattr(cls, n))
        names = tuple(name for name in names if not may_write(cls, name))
        if names:
            computed = computed_dtype if isinstance(module, LowPrecisionEmbedding) else gradient_dtype
            entries = {name: GraphEntry(None, module, name, "", computed) for name in names}
            swap(module, showing(cls, names), parameter_entries=entries)


def showing(cls: type[nn.Module], names: tuple[str, ...]) -> type[nn.Module]:
    """The class of modules of the class ``cls`` whose parameters ``names`` are readable in compiled graphs."""
    if (cls, names) not in _classes:
        state: dict[str, Any] = {name: property(_reading(name)) for name in names}
        state |= {"__module__": cls.__module__, "__doc__": cls.__doc__, "__reduce_ex__": _reducing(cls, names)}
        metaclass: Any = type(cls)
        _classes[cls, names] = metaclass(cls.__name__, (cls,), state)
    return _classes[cls, names]


def _reading(name: str) -> Callable[[Any], Tensor | None]:
    def read(module: Any) -> Tensor | None:
        if torch.compiler.is_compiling():
            entry = module.parameter_entries[name]
            if entry.prepare() and _is_own(module, name, entry):
                return read_parameter(module, name, entry.weight)
        if name not in module._parameters:
            raise AttributeError(name)  # Python asks __getattr__ then
        return module._parameters[name]  # type: ignore[no-any-return]

    return read


def _is_own(module: nn.Module, name: str, entry: GraphEntry) -> bool:
    """Whether the graph can read the module's own parameter, which is not that of a ``functional_call``."""
    own = entry.weight
    return own.data is not None and (not entry.shows() or module._parameters[name] is own.param)


def _reducing(cls: type[nn.Module], names: tuple[str, ...]) -> Callable[[Any, Any], Any]:
    """Copies and pickles find the class by what it was made of."""

    def reduce(module: Any, protocol: Any) -> Any:
        _, _, *state = super(showing(cls, names), module).__reduce_ex__(2)
        return _new, (cls, names), *state

    return reduce


def _new(cls: type[nn.Module], names: tuple[str, ...]) -> nn.Module:
    return object.__new__(showing(cls, names))

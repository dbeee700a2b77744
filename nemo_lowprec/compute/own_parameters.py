"""The parameters that modules read by themselves, in a compiled graph.

A converted linear layer hands its parameters to operators. Other modules read theirs as attributes: norms, embeddings,
convolutions, a class token, a table of position biases, the factors of a residual branch. Dynamo takes no parameter in
low-bit storage and none with a gradient of another dtype, and ends its graph there. So a module gets a class in which
these parameters are properties, which hand out the values that a ``GraphEntry`` reads where a graph is traced. A
parameter that the module may write in place is no property: the graph would write a copy.
"""

from __future__ import annotations

import copyreg
import functools
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


def show_own_parameters(model: nn.Module) -> None:
    """Let compiled graphs read the parameters of all modules of ``model`` that have no GEMM plan."""
    for module in model.modules():
        if "gemm_plan" in module.__dict__ or "gemm_plans" in module.__dict__:
            continue
        if getattr(module, "max_norm", None) is not None:  # an embedding that writes its table in each pass
            continue
        cls: Any = type(module)
        names = tuple(n for n, p in module._parameters.items() if p is not None and not hasattr(cls, n))
        names = tuple(name for name in names if not may_write(cls, name))
        if names:
            computed = computed_dtype if isinstance(module, LowPrecisionEmbedding) else gradient_dtype
            entries = {name: GraphEntry(None, module, name, "", computed) for name in names}
            swap(module, showing(cls, names), parameter_entries=entries)


@functools.cache
def showing(cls: Any, names: tuple[str, ...]) -> Any:
    """The class of modules of the class ``cls`` whose parameters ``names`` are readable in compiled graphs."""
    state = {name: property(_reading(name)) for name in names}
    metaclass: Any = type(cls)
    return _metaclass(metaclass)(cls.__name__, (cls,), {"__module__": cls.__module__, "__doc__": cls.__doc__, **state})


@functools.cache
def _metaclass(base: Any) -> Any:
    """The class of the classes that ``showing`` makes, which pickles find by what they were made of."""
    metaclass = type("Showing", (base,), {})
    copyreg.pickle(metaclass, _pickled)  # type: ignore[arg-type]
    return metaclass


def _pickled(cls: Any) -> Any:
    return showing, (cls.__bases__[0], tuple(name for name, value in vars(cls).items() if isinstance(value, property)))


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

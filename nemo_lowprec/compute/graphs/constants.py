"""Integers that a model makes of constants alone: the host may read them while a CUDA graph is captured.

transformers asks of ``torch.arange``'s own numbers whether a batch holds packed sequences. No graph can wait for the
GPU to answer, and the answer is the same in each pass. So here integers that no input, parameter or random number has
entered are computed on the CPU, too, and read there.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from nemo_lowprec.compat.modules import compiled_outside_of_mode
from nemo_lowprec.compat.tensors import tree_leaves, tree_map

_KNOWN = "_lowprec_known_integers"
_EXACT = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool)
_READS = (Tensor.__bool__, Tensor.__int__, Tensor.__index__, Tensor.item, Tensor.tolist)
_FACTORIES = (torch.arange, torch.zeros, torch.ones, torch.full, torch.tensor)
_OPERATIONS = frozenset(
    {
        "abs", "add", "all", "amax", "amin", "and", "any", "bool", "cat", "clamp", "clone", "contiguous",
        "cumsum", "diff", "eq", "expand", "flatten", "floor_divide", "floordiv", "ge", "getitem", "gt",
        "int", "invert", "le", "logical_and", "logical_not", "logical_or", "long", "lt", "mod", "mul",
        "narrow", "ne", "neg", "ones_like", "or", "permute", "prod", "radd", "remainder", "repeat",
        "reshape", "rmul", "roll", "rsub", "select", "squeeze", "stack", "sub", "sum", "to", "transpose",
        "unsqueeze", "view", "where", "zeros_like",
    }
)  # fmt: skip


@contextmanager
def known_integers_of(model: nn.Module) -> Iterator[None]:
    """Context in which the host reads known integers while ``model`` runs; its compiled modules run as ever."""
    with KnownIntegers(), compiled_outside_of_mode(model):
        yield


class KnownIntegers(TorchFunctionMode):
    """Context in which the host reads known integers without waiting for the GPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _READS and len(args) == 1 and not kwargs:
            known = _known(args[0])
            return func(args[0] if known is None else known)
        result = func(*args, **kwargs)
        if isinstance(result, Tensor) and result.dtype in _EXACT and "out" not in kwargs:
            _note(func, args, kwargs, result)
        return result


def _known(tensor: Tensor) -> Tensor | None:
    """The values of ``tensor`` on the CPU; None where they are not known, or were written since."""
    values, version = tensor.__dict__.get(_KNOWN, (None, 0))
    return values if version == tensor._version else None


def _note(func: Any, args: Any, kwargs: Any, result: Tensor) -> None:
    """Compute ``result`` on the CPU, too, if nothing but known integers has entered it."""
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    if func not in _FACTORIES:
        name = getattr(func, "__name__", "")
        if not tensors or (name.strip("_") if name.startswith("__") else name) not in _OPERATIONS:
            return
    if any(result is tensor or _known(tensor) is None for tensor in tensors):
        return
    try:
        there, named = tree_map(_on_cpu, (args, {"device": None, **kwargs} if func in _FACTORIES else kwargs))
        values = func(*there, **named)
    except Exception:  # nothing is known of it then
        return
    if isinstance(values, Tensor) and values.shape == result.shape and values.dtype == result.dtype:
        result.__dict__[_KNOWN] = values, result._version


def _on_cpu(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return _known(leaf)
    is_device = isinstance(leaf, torch.device) or (isinstance(leaf, str) and leaf.startswith(("cuda", "cpu")))
    return torch.device("cpu") if is_device else leaf

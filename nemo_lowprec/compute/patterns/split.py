"""Attention modules with one linear layer for queries, keys and values, as timm's have it.

The module's own forward runs on tensors without memory, which shows whether it splits the layer's output in the way
that ``compute/split.py`` knows. Its code is not replaced, nor is the way in which it attends.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nemo_lowprec.compute.backends.base import Backend
from nemo_lowprec.compute.backends.reference import ReferenceBackend
from nemo_lowprec.compute.class_swap import swap
from nemo_lowprec.compute.linear import LowPrecisionLinear
from nemo_lowprec.compute.patterns.own_code import innermost
from nemo_lowprec.compute.patterns.pattern import Match, Pattern, twin_of
from nemo_lowprec.compute.split import SplitLinear, as_layer_output

_BATCH, _TOKENS = 2, 4


class Split(Pattern):
    """Joins the gradients of queries, keys and values in the pass that quantizes them."""

    name = "split of queries, keys and values"

    def is_candidate(self, module: nn.Module) -> bool:
        return any(_is_split(module, child) for child in _linears(module).values())

    def recognise(self, module: nn.Module) -> Match | str:
        names = [name for name, child in _linears(module).items() if _is_split(module, child)]
        return Match(linears=tuple(names))

    def apply(self, module: nn.Module, match: Match, backend: Backend) -> None:
        for name in match.linears:
            layer = module._modules[name]
            if type(layer) is LowPrecisionLinear:
                swap(layer, SplitLinear)


def _linears(module: nn.Module) -> dict[str, nn.Linear]:
    """The children that may be split in three, of a module whose forward unbinds or indexes what it permutes."""
    own = innermost(type(module).forward)
    if own is None or not {"permute", "unbind", "rearrange"} & set(own.__code__.co_names):
        return {}
    return {
        name: child
        for name, child in module.named_children()
        if type(child) is nn.Linear and child.out_features % 3 == 0 and name in own.__code__.co_names
    }


class _Watched(nn.Module):
    """A linear layer on tensors without memory that notes how its output is split."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.weight = torch.empty_like(layer.weight, device="meta")
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self.bias = None if layer.bias is None else torch.empty_like(layer.bias, device="meta")
        self.seen: list[tuple[int, ...]] = []

    def forward(self, x: Tensor) -> Tensor:
        out = as_layer_output(F.linear(x, self.weight.detach()), ReferenceBackend())
        out.__dict__["_seen"] = self.seen
        return out


def _is_split(module: nn.Module, layer: nn.Linear) -> bool:
    """Whether the forward of ``module`` splits the output of its child ``layer`` in three."""
    on_meta = {
        name: torch.empty_like(param, device="meta")
        for name, param in module.named_parameters(remove_duplicate=False)
    }  # fmt: skip
    watched = _Watched(layer)
    try:
        twin = twin_of(module, on_meta)
        name = next(name for name, child in module._modules.items() if child is layer)
        twin._modules[name] = watched
        x = torch.empty(_BATCH, _TOKENS, layer.in_features, dtype=layer.weight.dtype, device="meta")
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            type(module).forward(twin, x)
    except Exception:  # what follows the split may need other inputs
        pass
    return bool(watched.seen)

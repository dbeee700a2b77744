"""Routers and experts that run their own forward on parameters of another dtype than the stored one.

Routers compute in FP32: a token goes to the experts with the largest scores, and rounded scores are often equal.
Experts that no grouped GEMM of this package computes have the half weights that autocast would give a linear layer:
torch has no autocast rule for its grouped GEMM, which would run in FP32 where the weights are FP32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from nemo_lowprec.compat.tensors import tree_leaves, tree_map
from nemo_lowprec.compute.autocast import AutocastOff
from nemo_lowprec.compute.class_swap import derive, swap
from nemo_lowprec.compute.experts.layout import layout_of
from nemo_lowprec.compute.experts.module import LowPrecisionExperts
from nemo_lowprec.tensors import QuantizedTensor

ROUTER = "a router (computed in FP32)"


class Fp32Router(nn.Module):
    """Runs a module's own forward in FP32, whatever its parameters are stored in."""

    @torch.compiler.disable
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = tree_map(_wide, (args, kwargs))
        devices = {leaf.device.type for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        with _reading(self, _wide), AutocastOff(next(iter(devices), "cpu")):
            return super().forward(*args, **kwargs)  # type: ignore[misc]


class HalfExperts(nn.Module):
    """Runs a module's own forward under autocast on half weights, and casts the output to the dtype of the tokens."""

    def forward(self, tokens: Tensor, *args: Any, **kwargs: Any) -> Any:
        device = tokens.device.type
        if not torch.is_autocast_enabled(device):
            return super().forward(tokens, *args, **kwargs)  # type: ignore[misc]
        half = torch.get_autocast_dtype(device)
        with _reading(self, lambda param: param.to(half)):
            return super().forward(tokens.to(half), *args, **kwargs).to(tokens.dtype)  # type: ignore[misc]


@contextmanager
def _reading(module: nn.Module, cast: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Context in which the parameters of ``module`` itself are what ``cast`` makes of them; gradients reach them."""
    own = dict(module._parameters)
    try:
        for name, param in own.items():
            if param is not None:
                module._parameters[name] = cast(param)  # type: ignore[assignment]
        yield
    finally:
        module._parameters.update(own)


def _wide(leaf: Any) -> Any:
    if not isinstance(leaf, Tensor) or not leaf.is_floating_point():
        return leaf
    return leaf if leaf.dtype == torch.float32 and not isinstance(leaf, QuantizedTensor) else leaf.float()


def compute_in_fp32(module: nn.Module) -> None:
    """Let ``module``, which has a router's matrix, compute in FP32. ``revert_layers`` undoes this."""
    _derive(module, Fp32Router)


def compute_in_half(model: nn.Module) -> None:
    """Let experts of ``model`` that are not converted compute in half precision under autocast."""
    for module in list(model.modules()):
        if layout_of(module) is not None and not isinstance(module, LowPrecisionExperts):
            _derive(module, HalfExperts)


def _derive(module: nn.Module, cls: type[nn.Module]) -> None:
    if "forward" not in module.__dict__ and not isinstance(module, cls):
        swap(module, derive(cls, type(module)))

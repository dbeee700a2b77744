"""Routers compute in FP32: a token goes to the experts with the largest scores, and rounded scores are often equal."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from nemo_lowprec.compat.tensors import tree_leaves, tree_map
from nemo_lowprec.compute.autocast import AutocastOff
from nemo_lowprec.compute.class_swap import derive, swap
from nemo_lowprec.tensors import QuantizedTensor

ROUTER = "a router (computed in FP32)"


class Fp32Router(nn.Module):
    """Runs a module's own forward in FP32, whatever its parameters are stored in; ``compute_in_fp32`` derives it."""

    @torch.compiler.disable
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = tree_map(_wide, (args, kwargs))
        devices = {leaf.device.type for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        own = dict(self._parameters)
        for name, param in own.items():
            if param is not None and (isinstance(param, QuantizedTensor) or param.dtype != torch.float32):
                self._parameters[name] = param.float()  # type: ignore[assignment]
        try:
            with AutocastOff(next(iter(devices), "cpu")):
                return super().forward(*args, **kwargs)  # type: ignore[misc]
        finally:
            self._parameters.update(own)


def _wide(leaf: Any) -> Any:
    return leaf.float() if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf


def compute_in_fp32(module: nn.Module) -> None:
    """Let ``module``, which has a router's matrix, compute in FP32. ``revert_layers`` undoes this."""
    if "forward" not in module.__dict__ and not isinstance(module, Fp32Router):
        swap(module, derive(Fp32Router, type(module)))

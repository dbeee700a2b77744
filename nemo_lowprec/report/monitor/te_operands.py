"""Errors of the operands of Transformer Engine's own linear layers, which announce nothing.

While a step is sampled, hooks read the input, the weight and the output gradient of each layer, and quantize them by
copies of the layer's quantizers, with the scales that the layer has used. Layers that are read are ``te.Linear`` and
``te.LayerNormLinear`` and their subclasses, Megatron-core's among them. Nobody sees the inner values of
``te.LayerNormMLP``.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from nemo_lowprec.chart.recipe import Recipe
from nemo_lowprec.compat.transformer_engine import fp8_data, import_te, without_amax
from nemo_lowprec.compute.autocast import AutocastOff
from nemo_lowprec.compute.backends import find_backend
from nemo_lowprec.compute.backends.base import NormKind, plain_norm
from nemo_lowprec.compute.te_layers import is_te_module
from nemo_lowprec.report.monitor.operands import OperandErrors

_FORWARD, _BACKWARD = "scaling_fwd", "scaling_bwd"  # keys of a layer's quantizers: input and weight, output gradient


def te_linears(model: nn.Module) -> dict[str, nn.Module]:
    """Transformer Engine's linear layers in ``model`` that are read, by name."""
    found = {name: module for name, module in model.named_modules() if is_te_module(module)}
    if not found:
        return {}
    te = import_te()
    return {name: module for name, module in found.items() if isinstance(module, (te.Linear, te.LayerNormLinear))}


class TEOperands:
    """Reads the operands of some layers into the table of ``errors``.

    Args:
        layers: by their names in ``errors``.
        recipe: the level's.
        errors: has rows for the layers.
        device: of the layers.
    """

    def __init__(
        self, layers: Mapping[str, nn.Module], recipe: Recipe, errors: OperandErrors, device: torch.device
    ) -> None:
        self._layers, self._errors, self._device = layers, errors, device
        self._backend, _ = find_backend("te", recipe, device)

    def watch(self, window: ExitStack) -> None:
        """Read the layers until ``window`` is closed."""
        for name, layer in self._layers.items():
            window.callback(layer.register_forward_hook(partial(self._after_forward, name)).remove)

    def _after_forward(self, name: str, layer: Any, args: Any, output: Any) -> None:
        if not (layer.fp8 and layer.training and torch.is_grad_enabled()):
            return
        source, weight = layer.quantizers[_FORWARD][:2]
        with torch.no_grad(), AutocastOff("cuda"):
            x = args[0].detach()
            self._add(name, "input", _normalized(layer, x) if hasattr(layer, "layer_norm_weight") else x, source)
            if fp8_data(layer.weight) is None:
                self._add(name, "weight", layer.weight.detach(), weight)
        out = output[0] if isinstance(output, tuple) else output
        if out.requires_grad:
            out.register_hook(partial(self._before_backward, name, layer))

    @torch.no_grad()
    def _before_backward(self, name: str, layer: Any, grad: Tensor) -> None:
        self._add(name, "grad_output", grad.detach(), layer.quantizers[_BACKWARD][0])

    def _add(self, name: str, kind: str, values: Tensor, quantizer: Any) -> None:
        half = values.reshape(-1, values.shape[-1])
        if half.dtype == torch.float32:
            half = half.to(torch.bfloat16)
        operand = without_amax(quantizer).quantize(half.contiguous())
        self._errors.quantized(name, kind, half, operand, self._backend)


def _normalized(layer: Any, x: Tensor) -> Tensor:
    """The input of a ``te.LayerNormLinear``'s GEMM: the output of its norm."""
    is_layer = layer.normalization == "LayerNorm"
    kind = NormKind(tuple(layer.layer_norm_weight.shape), layer.eps, is_layer, layer.zero_centered_gamma)
    weight = layer.layer_norm_weight
    if is_layer and layer.zero_centered_gamma:
        weight = weight + 1
    return plain_norm(x, weight, layer.layer_norm_bias if is_layer else None, kind, x.dtype)

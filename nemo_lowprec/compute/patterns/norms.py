"""Norms: statistics in FP32, output in the level's half dtype.

Under autocast torch's layer_norm reads and returns FP32, and the RMSNorm classes of transformers make several FP32
copies of their input; a converted norm reads its input and writes half precision once.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from nemo_lowprec.compute.autocast import AutocastOff, autocast_off
from nemo_lowprec.compute.backends.base import Backend, NormKind, plain_norm
from nemo_lowprec.compute.class_swap import dtype_obstacle, swap
from nemo_lowprec.compute.patterns.pattern import Match, Pattern, probing, run_with


class LowPrecisionNorm(nn.Module):
    """Base of converted norms.

    Attributes:
        norm_backend: has the kernel.
        kind: how the norm computes.
    """

    norm_backend: Backend
    kind: NormKind

    def call(self, out: torch.dtype) -> Any:
        """The norm's ``NormCall`` that writes ``out``; None where no kernel computes it together with a sum."""
        kind = self.kind
        weight: Any = self.weight
        bias: Any = self.bias if kind.layer else None
        return None if weight is None else self.norm_backend.norm_call(weight, bias, kind, out)

    def _compute(self, x: Tensor) -> Tensor:
        """The norm of ``x``, in autocast's dtype or that of ``x``."""
        kind = self.kind
        weight: Any = self.weight
        bias: Any = self.bias if kind.layer else None
        device = "cuda" if x.is_cuda else x.device.type
        out = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
        if torch.compiler.is_compiling():  # which fuses torch's operations, and cannot trace a backend's kernels
            with autocast_off(device):
                return plain_norm(x, weight, bias, kind, out)
        with AutocastOff(device):
            return self.norm_backend.norm(x, weight, bias, kind, out)


class LowPrecisionLayerNorm(LowPrecisionNorm, nn.LayerNorm):
    """``nn.LayerNorm`` with FP32 statistics and half output. Conversion makes it of what computes a LayerNorm."""

    @property
    def kind(self) -> NormKind:  # type: ignore[override]
        return NormKind(self.normalized_shape, self.eps, True, False)

    def forward(self, input: Tensor) -> Tensor:
        return self._compute(input)


class LowPrecisionRMSNorm(LowPrecisionNorm, nn.RMSNorm):
    """``nn.RMSNorm`` with FP32 statistics and half output. Conversion makes it of modules that compute an RMSNorm.

    Attributes:
        zero_centered: whether the factor is 1 + weight (Gemma).
    """

    zero_centered: bool

    @property
    def kind(self) -> NormKind:  # type: ignore[override]
        eps = torch.finfo(torch.float32).eps if self.eps is None else self.eps
        return NormKind(self.normalized_shape, eps, False, self.zero_centered)

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return self._compute(x)


class Norms(Pattern):
    """``nn.LayerNorm``, ``nn.RMSNorm``, and other modules that compute the same over the last dimension."""

    name = "norm"
    is_parent = False

    def is_candidate(self, module: nn.Module) -> bool:
        cls = type(module)
        # Transformer Engine's norms, which Megatron-core builds its models of, hand their results over in FP8.
        if cls.__module__.startswith(("transformer_engine.", "megatron.")):
            return False
        return isinstance(module, (nn.LayerNorm, nn.RMSNorm)) or cls.__name__.lower().endswith(("layernorm", "rmsnorm"))

    def recognise(self, module: nn.Module) -> Match | str:
        if is_parametrized(module):  # to read the weight would compute it
            return "its weight is computed (weight_norm or another parametrization)"
        for param in (getattr(module, "weight", None), getattr(module, "bias", None)):
            if isinstance(param, Tensor) and (obstacle := dtype_obstacle(param)):
                return obstacle
        if type(module) in (nn.LayerNorm, nn.RMSNorm):
            return Match(norms=("",), settings={"zero_centered": False} if type(module) is nn.RMSNorm else {})
        settings = _settings(module)
        if settings is None:
            return f"{type(module).__name__} computes neither a plain LayerNorm nor a plain RMSNorm"
        return Match(norms=("",), settings=settings)

    def apply(self, module: nn.Module, match: Match, backend: Backend) -> None:
        cls = LowPrecisionRMSNorm if "zero_centered" in match.settings else LowPrecisionLayerNorm
        swap(module, cls, norm_backend=backend, **match.settings)


@probing()
def _settings(module: nn.Module) -> dict[str, Any] | None:
    """The attributes with which ``LowPrecisionLayerNorm`` or ``LowPrecisionRMSNorm`` computes the same as ``module``.

    None where neither can. Those of an RMSNorm hold ``zero_centered``.

    The forward of ``module`` runs on a small random input of three dimensions: a class of the same name with another
    formula, or over another dimension, is left alone. The parameters are random, too: with the initial weights of 1,
    ``2 * weight`` and ``1 + weight`` would be equal.
    """
    weight, bias = getattr(module, "weight", None), getattr(module, "bias", None)
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if not isinstance(weight, Tensor) or weight.dim() != 1 or not isinstance(eps, float) or list(module.children()):
        return None
    generator = torch.Generator().manual_seed(0)
    place = torch.empty(0, dtype=weight.dtype, device="cpu" if weight.is_meta else weight.device)
    shape = tuple(weight.shape)
    x = torch.randn(2, 3, *shape, generator=generator, dtype=torch.float32).to(place)
    parameters = {"weight": (0.25 + 0.5 * torch.rand(shape, generator=generator, dtype=torch.float32)).to(place)}
    if bias is not None:
        parameters["bias"] = torch.randn(shape, generator=generator, dtype=torch.float32).to(place)
    got = run_with(module, parameters, x)
    if got is None or got.shape != x.shape:
        return None
    common = {"eps": eps, "normalized_shape": shape, "elementwise_affine": True}
    layer = common if hasattr(module, "bias") else common | {"bias": None}  # which an nn.LayerNorm reads
    w, b = parameters["weight"].float(), parameters["bias"].float() if bias is not None else None
    formulas = [(layer, F.layer_norm(x.float(), shape, w, b, eps))]
    if bias is None:
        for zero_centered in (False, True):
            settings = common | {"zero_centered": zero_centered}
            formulas.append((settings, F.rms_norm(x.float(), shape, w + float(zero_centered), eps)))
    return next((s for s, want in formulas if torch.allclose(got.float(), want, rtol=1e-2, atol=1e-3)), None)

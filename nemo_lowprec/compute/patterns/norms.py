"""Norms: statistics in FP32, output in the level's half dtype.

Under autocast torch's layer_norm returns FP32, and the RMSNorm classes of transformers make several FP32 copies of
their input; a converted norm reads and writes half precision once.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nemo_lowprec.compute.autocast import autocast_off
from nemo_lowprec.compute.backends.base import Backend
from nemo_lowprec.compute.class_swap import dtype_obstacle, swap
from nemo_lowprec.compute.compiled import has_own_weight, read_parameter
from nemo_lowprec.compute.graph_entry import GraphEntry
from nemo_lowprec.compute.patterns.pattern import Match, Pattern, run_with


def _dtypes(weight: Tensor | None, x: Tensor) -> tuple[torch.dtype, torch.dtype]:
    """(dtype to compute from, dtype of the output)."""
    out = torch.get_autocast_dtype(x.device.type) if torch.is_autocast_enabled(x.device.type) else x.dtype
    # Half input is not cast; FP32 weights are rounded to its dtype, since torch's kernels take one dtype.
    same = weight is None or weight.dtype == x.dtype or x.dtype in (torch.float16, torch.bfloat16)
    return (x.dtype if same else torch.float32), out


def _to(t: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    return t if t is None else t.to(dtype)


class LowPrecisionLayerNorm(nn.LayerNorm):
    """``nn.LayerNorm`` with FP32 statistics and half output. Conversion makes it of an ``nn.LayerNorm``.

    Attributes:
        entry: says what a compiled graph reads.
    """

    entry: GraphEntry

    def forward(self, input: Tensor) -> Tensor:
        if torch.compiler.is_compiling() and self.entry.prepare() and has_own_weight(self, "weight", self.entry):
            weight = read_parameter(self, "weight", self.entry.weight)
            bias = read_parameter(self, "bias", self.entry.bias)
        else:
            weight, bias = self.weight, self.bias
        dtype, out = _dtypes(weight, input)
        with autocast_off(input.device.type):
            weight, bias = _to(weight, dtype), _to(bias, dtype)
            return F.layer_norm(input.to(dtype), self.normalized_shape, weight, bias, self.eps).to(out)


class LowPrecisionRMSNorm(nn.RMSNorm):
    """``nn.RMSNorm`` with FP32 statistics and half output. Conversion makes it of torch's and transformers' classes.

    Attributes:
        norm_backend: has the kernel.
        zero_centered: whether the factor is 1 + weight (Gemma).
        entry: says what a compiled graph reads.
    """

    entry: GraphEntry
    norm_backend: Backend
    zero_centered: bool

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        weight = self._weight() if torch.compiler.is_compiling() else self.weight
        dtype, out = _dtypes(weight, x)
        eps = torch.finfo(torch.float32).eps if self.eps is None else self.eps
        with autocast_off(x.device.type):
            weight = _to(weight, dtype)
            if len(self.normalized_shape) == 1:
                return self.norm_backend.rms_norm(x.to(dtype), weight, eps, self.zero_centered).to(out)
            return F.rms_norm(x.to(dtype), self.normalized_shape, weight, eps).to(out)

    def _weight(self) -> Tensor | None:
        own = self.entry.prepare() and has_own_weight(self, "weight", self.entry)
        return read_parameter(self, "weight", self.entry.weight) if own else self.weight


class Norms(Pattern):
    """``nn.LayerNorm``, ``nn.RMSNorm``, and transformers' modules that compute a plain RMSNorm."""

    name = "norm"
    is_parent = False

    def is_candidate(self, module: nn.Module) -> bool:
        cls = type(module)
        by_name = cls.__name__.endswith("RMSNorm") and cls.__module__.startswith("transformers.")
        return cls in (nn.LayerNorm, nn.RMSNorm) or by_name

    def recognise(self, module: nn.Module) -> Match | str:
        weight = getattr(module, "weight", None)
        if isinstance(weight, Tensor) and (obstacle := dtype_obstacle(weight)):
            return obstacle
        if type(module) in (nn.LayerNorm, nn.RMSNorm):
            return Match(norms=("",), settings={"zero_centered": False})
        settings = _rms_norm_settings(module)
        if settings is None:
            return f"{type(module).__name__} does not compute a plain RMSNorm"
        return Match(norms=("",), settings=settings)

    def apply(self, module: nn.Module, match: Match, backend: Backend) -> None:
        if type(module) is nn.LayerNorm:
            swap(module, LowPrecisionLayerNorm, entry=GraphEntry(None, module))
        else:
            entry = GraphEntry(None, module)
            swap(module, LowPrecisionRMSNorm, norm_backend=backend, entry=entry, **match.settings)


def _rms_norm_settings(module: nn.Module) -> dict[str, Any] | None:
    """The attributes with which ``LowPrecisionRMSNorm`` computes the same as ``module``; None where it cannot.

    The forward of ``module`` runs on a small random input: a class of the same name with another formula is left alone.
    The weights are random, too: with the initial weights of 1, ``2 * weight`` and ``1 + weight`` would be equal.
    """
    weight = getattr(module, "weight", None)
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if not isinstance(weight, Tensor) or weight.dim() != 1 or not isinstance(eps, float) or list(module.children()):
        return None
    generator = torch.Generator().manual_seed(0)
    place = torch.empty(0, dtype=weight.dtype, device="cpu" if weight.is_meta else weight.device)
    shape = tuple(weight.shape)
    x = torch.randn(4, *shape, generator=generator).to(place)
    weight = (0.25 + 0.5 * torch.rand(shape, generator=generator)).to(place)
    got = run_with(module, {"weight": weight}, x)
    if got is None or got.shape != x.shape:
        return None
    for zero_centered in (False, True):
        factor = weight.float() + (1.0 if zero_centered else 0.0)
        want = F.rms_norm(x.float(), shape, factor, eps)
        if torch.allclose(got.float(), want, rtol=1e-2, atol=1e-3):
            return {"zero_centered": zero_centered, "eps": eps, "normalized_shape": shape, "elementwise_affine": True}
    return None

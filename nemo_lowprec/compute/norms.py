"""Converted norms: statistics in FP32, output in the level's half dtype.

Under autocast torch's layer_norm returns FP32, and the RMSNorm classes of transformers make several FP32 copies of
their input; a converted norm reads and writes half precision once.
"""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nemo_lowprec.compute.backends.base import Backend

__all__ = ["LowPrecisionLayerNorm", "LowPrecisionRMSNorm", "rms_norm_kind"]


def _dtypes(module: nn.Module, x: Tensor) -> tuple[torch.dtype, torch.dtype]:
    """(dtype to compute from, dtype of the output)."""
    weight = module.weight
    out = torch.get_autocast_dtype(x.device.type) if torch.is_autocast_enabled(x.device.type) else x.dtype
    # Half input is read as it is, once, with weights rounded to its dtype: torch's kernels take one dtype.
    same = weight is None or weight.dtype == x.dtype or x.dtype in (torch.float16, torch.bfloat16)
    return (x.dtype if same else torch.float32), out


def _to(t: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    return t if t is None else t.to(dtype)


class LowPrecisionLayerNorm(nn.LayerNorm):
    """``nn.LayerNorm`` with FP32 statistics and half output; made by ``convert``."""

    def forward(self, input: Tensor) -> Tensor:
        dtype, out = _dtypes(self, input)
        with torch.autocast(input.device.type, enabled=False):
            weight, bias = _to(self.weight, dtype), _to(self.bias, dtype)
            return F.layer_norm(input.to(dtype), self.normalized_shape, weight, bias, self.eps).to(out)


class LowPrecisionRMSNorm(nn.RMSNorm):
    """``nn.RMSNorm`` with FP32 statistics and half output; made by ``convert`` from torch's or transformers' classes.

    With ``zero_centered`` the factor is 1 + weight (Gemma).
    """

    norm_backend: Backend
    zero_centered: bool

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        dtype, out = _dtypes(self, x)
        eps = torch.finfo(torch.float32).eps if self.eps is None else self.eps
        with torch.autocast(x.device.type, enabled=False):
            weight = _to(self.weight, dtype)
            if len(self.normalized_shape) == 1:
                return self.norm_backend.rms_norm(x.to(dtype), weight, eps, self.zero_centered).to(out)
            return F.rms_norm(x.to(dtype), self.normalized_shape, weight, eps).to(out)


def rms_norm_kind(module: nn.Module) -> tuple[float, bool] | None:
    """Recognise an RMSNorm of another library by what it computes.

    Returns (eps, zero_centered), or None where the module does something else. The check runs the class's forward on
    a small random input with random weights (with the initial ones, twice the weight would be one plus the weight), so
    that a class of the same name with another formula is left alone.
    """
    weight = getattr(module, "weight", None)
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if not isinstance(weight, Tensor) or weight.dim() != 1 or not isinstance(eps, float):
        return None
    if any(True for _ in module.children()) or len(list(module.parameters(recurse=False))) != 1:
        return None
    generator = torch.Generator().manual_seed(0)
    place = torch.empty(0, dtype=weight.dtype, device="cpu" if weight.is_meta else weight.device)
    x = torch.randn(4, weight.numel(), generator=generator).to(place)
    weight = (0.25 + 0.5 * torch.rand(weight.numel(), generator=generator)).to(place)
    probe = copy.copy(module)  # shares all but its parameters
    probe.__dict__["_parameters"] = {"weight": nn.Parameter(weight)}
    try:
        with torch.no_grad(), torch.autocast(x.device.type, enabled=False):
            got = type(module).forward(probe, x)
    except Exception:  # any failure means: not a plain norm
        return None
    if not isinstance(got, Tensor) or got.shape != x.shape:
        return None
    for zero_centered in (False, True):
        factor = weight.float() + (1.0 if zero_centered else 0.0)
        want = F.rms_norm(x.float(), (weight.numel(),), factor, eps)
        if torch.allclose(got.float(), want, rtol=1e-2, atol=1e-3):
            return eps, zero_centered
    return None

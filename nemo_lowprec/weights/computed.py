"""Modules that compute the weight they use from the parameters they hold, in FP32."""

from __future__ import annotations

from torch import nn
from torch.nn.utils.parametrize import ParametrizationList
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm


def computes_weight(module: nn.Module) -> bool:
    """Whether ``module`` is a parametrization, or has the hook of ``torch.nn.utils.spectral_norm`` or ``weight_norm``.

    Their buffers are FP32, and torch multiplies no half parameters with them.
    """
    hooks = module._forward_pre_hooks.values()
    return isinstance(module, ParametrizationList) or any(isinstance(h, SpectralNorm | WeightNorm) for h in hooks)

"""Modules whose parameters stay FP32 at every level."""

from __future__ import annotations

from torch import nn
from torch.nn.utils.parametrize import ParametrizationList
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from nemo_lowprec.compat.modules import NormWithStatistics, forward_pre_hooks


def kept_in_fp32(model: nn.Module, low_bit: bool) -> set[int]:
    """Ids of the parameters of ``model`` that stay FP32: at the MS-AMP levels with ``low_bit``, else at all others."""
    needs = needs_plain_fp32 if low_bit else needs_fp32
    return {id(p) for module in model.modules() if needs(module) for p in module._parameters.values() if p is not None}


def needs_fp32(module: nn.Module) -> bool:
    """Whether ``module`` computes its weight, or is a batch or instance norm, whose statistics are FP32."""
    return _computes_weight(module) or isinstance(module, NormWithStatistics)


def needs_plain_fp32(module: nn.Module) -> bool:
    """Whether ``module`` computes its weight, or is an RNN, which gives cuDNN the addresses of its weights."""
    return _computes_weight(module) or isinstance(module, nn.RNNBase)


def _computes_weight(module: nn.Module) -> bool:
    """Whether ``module`` is a parametrization, or has the hook of ``torch.nn.utils.spectral_norm`` or ``weight_norm``.

    Such a module has FP32 buffers, by which torch multiplies no half parameters.
    """
    return isinstance(module, ParametrizationList) or any(
        isinstance(h, SpectralNorm | WeightNorm) for h in forward_pre_hooks(module)
    )

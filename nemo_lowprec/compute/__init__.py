"""Column Computation (GEMM): which layers are converted, the FP8 recipe, and the backends that run it."""

from nemo_lowprec.compute import te_layers
from nemo_lowprec.compute.attention import ATTENTION, check_attention, prefer_attention
from nemo_lowprec.compute.backends import BACKENDS, Backend, choose_backend
from nemo_lowprec.compute.backends.reference import ReferenceBackend
from nemo_lowprec.compute.convert import (
    Conversion,
    convert_layers,
    gemm_plans,
    is_converted,
    linear_weights,
    revert_layers,
    take_fp32_input,
    take_fp32_input_outside_autocast,
)
from nemo_lowprec.compute.filters import LayerFilter
from nemo_lowprec.compute.layers_table import describe_layers
from nemo_lowprec.compute.linear import GemmPlan, LowPrecisionConv1D, LowPrecisionLinear
from nemo_lowprec.compute.multihead import LowPrecisionMultiheadAttention
from nemo_lowprec.compute.norms import LowPrecisionLayerNorm, LowPrecisionRMSNorm
from nemo_lowprec.compute.recipe import OPERANDS, Operand, Recipe
from nemo_lowprec.compute.weight_scales import WeightScales
from nemo_lowprec.compute.wrappers import check_unwrapped, is_managed_by_fsdp

__all__ = [
    "ATTENTION",
    "BACKENDS",
    "OPERANDS",
    "Backend",
    "Conversion",
    "GemmPlan",
    "LayerFilter",
    "LowPrecisionConv1D",
    "LowPrecisionLayerNorm",
    "LowPrecisionLinear",
    "LowPrecisionMultiheadAttention",
    "LowPrecisionRMSNorm",
    "Operand",
    "Recipe",
    "ReferenceBackend",
    "WeightScales",
    "check_attention",
    "check_unwrapped",
    "choose_backend",
    "convert_layers",
    "describe_layers",
    "gemm_plans",
    "is_converted",
    "is_managed_by_fsdp",
    "linear_weights",
    "prefer_attention",
    "revert_layers",
    "take_fp32_input",
    "take_fp32_input_outside_autocast",
    "te_layers",
]

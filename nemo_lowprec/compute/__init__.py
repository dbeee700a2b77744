"""Column Computation (GEMM): which layers are converted, the FP8 recipe, and the backends that run it."""

from nemo_lowprec.compute import te_layers
from nemo_lowprec.compute.attention import ATTENTION, check_attention, prefer_attention
from nemo_lowprec.compute.backends import BACKENDS, Backend, choose_backend
from nemo_lowprec.compute.backends.reference import ReferenceBackend
from nemo_lowprec.compute.convert import Conversion, convert_layers, is_converted, revert_layers, take_fp32_input
from nemo_lowprec.compute.filters import LayerFilter
from nemo_lowprec.compute.linear import GemmPlan, LowPrecisionConv1D, LowPrecisionLinear
from nemo_lowprec.compute.norms import LowPrecisionLayerNorm, LowPrecisionRMSNorm
from nemo_lowprec.compute.recipe import OPERANDS, Operand, Recipe

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
    "LowPrecisionRMSNorm",
    "Operand",
    "Recipe",
    "ReferenceBackend",
    "check_attention",
    "choose_backend",
    "convert_layers",
    "is_converted",
    "prefer_attention",
    "revert_layers",
    "take_fp32_input",
    "te_layers",
]

"""Column Computation (GEMM): which layers are converted, the FP8 recipe, and the backends that run it."""

from nemo_lowprec.compute import te_layers
from nemo_lowprec.compute.amaxes import AmaxState, DelayedAmaxes, TEAmaxes
from nemo_lowprec.compute.backends import BACKENDS, Backend, choose_backend
from nemo_lowprec.compute.backends.reference import ReferenceBackend
from nemo_lowprec.compute.class_swap import is_converted, revert_layers
from nemo_lowprec.compute.computation import Computation
from nemo_lowprec.compute.convert import (
    Conversion,
    convert_layers,
    gemm_plans,
    linear_weights,
    take_fp32_input,
    take_fp32_input_outside_autocast,
)
from nemo_lowprec.compute.layers_table import describe_layers
from nemo_lowprec.compute.linear import GemmPlan, LowPrecisionConv1D, LowPrecisionLinear
from nemo_lowprec.compute.multihead import LowPrecisionMultiheadAttention
from nemo_lowprec.compute.operands import OPERANDS, Operand, new_histories, new_weight_scales, operand_of
from nemo_lowprec.compute.patterns import LowPrecisionLayerNorm, LowPrecisionRMSNorm
from nemo_lowprec.compute.weight_scales import WeightScales

__all__ = [
    "BACKENDS",
    "OPERANDS",
    "AmaxState",
    "Backend",
    "Computation",
    "Conversion",
    "DelayedAmaxes",
    "GemmPlan",
    "LowPrecisionConv1D",
    "LowPrecisionLayerNorm",
    "LowPrecisionLinear",
    "LowPrecisionMultiheadAttention",
    "LowPrecisionRMSNorm",
    "Operand",
    "ReferenceBackend",
    "TEAmaxes",
    "WeightScales",
    "choose_backend",
    "convert_layers",
    "describe_layers",
    "gemm_plans",
    "is_converted",
    "linear_weights",
    "new_histories",
    "new_weight_scales",
    "operand_of",
    "revert_layers",
    "take_fp32_input",
    "take_fp32_input_outside_autocast",
    "te_layers",
]

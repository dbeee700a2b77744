"""Column Computation (GEMM): which layers are converted, the FP8 recipe, and the backends that run it."""

from nemo_lowprec.compute.amaxes import AmaxState, CurrentAmaxes, DelayedAmaxes, TEAmaxes
from nemo_lowprec.compute.backends import BACKENDS, Backend, choose_backend
from nemo_lowprec.compute.backends.reference import ReferenceBackend
from nemo_lowprec.compute.class_swap import is_converted, revert_layers
from nemo_lowprec.compute.computation import Computation
from nemo_lowprec.compute.conversion import Conversion
from nemo_lowprec.compute.convert import convert_layers, gemm_plans, linear_weights
from nemo_lowprec.compute.layers_table import describe_layers
from nemo_lowprec.compute.linear import LowPrecisionConv1D, LowPrecisionLinear

__all__ = [
    "BACKENDS",
    "AmaxState",
    "Backend",
    "Computation",
    "Conversion",
    "CurrentAmaxes",
    "DelayedAmaxes",
    "LowPrecisionConv1D",
    "LowPrecisionLinear",
    "ReferenceBackend",
    "TEAmaxes",
    "choose_backend",
    "convert_layers",
    "describe_layers",
    "gemm_plans",
    "is_converted",
    "linear_weights",
    "revert_layers",
]

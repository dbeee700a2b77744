"""Number formats, scales and rounding: the one definition of the numerics, in plain torch."""

from nemo_lowprec.formats.delayed import AmaxSlot, DelayedScaling
from nemo_lowprec.formats.floats import E4M3, E5M2, FP16, FloatFormat, cast, decode
from nemo_lowprec.formats.gemm_block_scaling import BlockLayout, BlockScaledMatrix, dequantize_blocks, quantize_blocks
from nemo_lowprec.formats.scale import compute_amax, compute_scale, power_of_two_scale

__all__ = [
    "E4M3",
    "E5M2",
    "FP16",
    "AmaxSlot",
    "BlockLayout",
    "BlockScaledMatrix",
    "DelayedScaling",
    "FloatFormat",
    "cast",
    "compute_amax",
    "compute_scale",
    "decode",
    "dequantize_blocks",
    "power_of_two_scale",
    "quantize_blocks",
]

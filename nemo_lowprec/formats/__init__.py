"""Number formats and scaled tensors: the one definition of the numerics, in plain torch."""

from nemo_lowprec.formats.block import BlockLayout, BlockScaled, dequantize_blocks, quantize_blocks
from nemo_lowprec.formats.delayed import DelayedScaling, Slot
from nemo_lowprec.formats.floats import E4M3, E5M2, FloatFormat, cast, decode, get_format
from nemo_lowprec.formats.scale import compute_amax, compute_scale
from nemo_lowprec.formats.scaled_tensor import ScaledTensor

__all__ = [
    "E4M3",
    "E5M2",
    "BlockLayout",
    "BlockScaled",
    "DelayedScaling",
    "FloatFormat",
    "ScaledTensor",
    "Slot",
    "cast",
    "compute_amax",
    "compute_scale",
    "decode",
    "dequantize_blocks",
    "get_format",
    "quantize_blocks",
]

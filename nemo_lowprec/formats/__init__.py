"""Number formats and scaled tensors: the one definition of the numerics, in plain torch."""

from nemo_lowprec.formats.block import BlockLayout, BlockScaled, dequantize_blocks, quantize_blocks
from nemo_lowprec.formats.block_tensor import BlockTensor
from nemo_lowprec.formats.cast_tensor import CastTensor
from nemo_lowprec.formats.delayed import DelayedScaling, Slot
from nemo_lowprec.formats.floats import E4M3, E5M2, FP16, FloatFormat, cast, decode, get_format
from nemo_lowprec.formats.gradient import GradientTensor
from nemo_lowprec.formats.scale import compute_amax, compute_scale, power_of_two_scale
from nemo_lowprec.formats.scaled_tensor import ScaledTensor
from nemo_lowprec.formats.shards import BlockShard, Fp8Gathered, FullShard, HalfShard, PlainShard, Shard
from nemo_lowprec.formats.stored import StoredTensor

__all__ = [
    "E4M3",
    "E5M2",
    "FP16",
    "BlockLayout",
    "BlockScaled",
    "BlockShard",
    "BlockTensor",
    "CastTensor",
    "DelayedScaling",
    "FloatFormat",
    "Fp8Gathered",
    "FullShard",
    "GradientTensor",
    "HalfShard",
    "PlainShard",
    "ScaledTensor",
    "Shard",
    "Slot",
    "StoredTensor",
    "cast",
    "compute_amax",
    "compute_scale",
    "decode",
    "dequantize_blocks",
    "get_format",
    "power_of_two_scale",
    "quantize_blocks",
]

"""Tensor subclasses that hold the formats: FP8 and FP16 weights, optimizer states, gradients, and shards of weights."""

from nemo_lowprec.tensors.block_scaled_tensor import BlockScaledTensor
from nemo_lowprec.tensors.fp8_weight import Fp8Weight
from nemo_lowprec.tensors.fp16_weight import Fp16Weight
from nemo_lowprec.tensors.gradient import GradientTensor
from nemo_lowprec.tensors.quantized_tensor import QuantizedTensor, stored_data
from nemo_lowprec.tensors.shards import BlockShard, Fp8Gathered, FullShard, HalfShard, PlainShard, Shard

__all__ = [
    "BlockScaledTensor",
    "BlockShard",
    "Fp8Gathered",
    "Fp8Weight",
    "Fp16Weight",
    "FullShard",
    "GradientTensor",
    "HalfShard",
    "PlainShard",
    "QuantizedTensor",
    "Shard",
    "stored_data",
]

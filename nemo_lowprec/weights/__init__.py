"""Columns Weight and Master weight: one ``WeightStore`` for each way of holding the parameters of a model."""

from nemo_lowprec.weights.fp32 import Fp32Weights
from nemo_lowprec.weights.fp32_modules import kept_in_fp32
from nemo_lowprec.weights.frozen import FrozenInFp8, is_frozen_fp8
from nemo_lowprec.weights.low_bit import LowBitWeights
from nemo_lowprec.weights.masters import MasterWeights
from nemo_lowprec.weights.saved_form import master_of
from nemo_lowprec.weights.sharded import ShardedWeights
from nemo_lowprec.weights.store import WeightStore

__all__ = [
    "Fp32Weights",
    "FrozenInFp8",
    "LowBitWeights",
    "MasterWeights",
    "ShardedWeights",
    "WeightStore",
    "is_frozen_fp8",
    "kept_in_fp32",
    "master_of",
]

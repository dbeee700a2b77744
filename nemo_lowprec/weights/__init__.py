"""Columns Weight and Master weight."""

from nemo_lowprec.weights.low_bit import LowBitWeights
from nemo_lowprec.weights.masters import MasterWeights
from nemo_lowprec.weights.memory import check_memory
from nemo_lowprec.weights.saved_form import master_of
from nemo_lowprec.weights.sharded import ShardedWeights, kept_in_fp32
from nemo_lowprec.weights.widened import TrainedWeights

__all__ = [
    "LowBitWeights",
    "MasterWeights",
    "ShardedWeights",
    "TrainedWeights",
    "check_memory",
    "kept_in_fp32",
    "master_of",
]

"""Column Comm: gradients averaged over processes in the level's format, on stock collectives."""

from nemo_lowprec.comm.agree import anywhere, broadcast_weights, check_same, reduce_amax, refuse_together
from nemo_lowprec.comm.buckets import Fp8ShardBucket
from nemo_lowprec.comm.ddp import leave_to_ddp, take_from_ddp
from nemo_lowprec.comm.reducer import GradientReducer

__all__ = [
    "Fp8ShardBucket",
    "GradientReducer",
    "anywhere",
    "broadcast_weights",
    "check_same",
    "leave_to_ddp",
    "reduce_amax",
    "refuse_together",
    "take_from_ddp",
]

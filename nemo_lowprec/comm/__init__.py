"""Column Comm: gradients averaged over processes in the level's format, on stock collectives."""

from nemo_lowprec.comm.agree import any_rank_, broadcast_weights, by_rank, check_same, meet, raise_together, reduce_amax
from nemo_lowprec.comm.averaging import Averaging, ShardAveraging
from nemo_lowprec.comm.ddp import give_back_to_ddp, leave_to_ddp, take_from_ddp
from nemo_lowprec.comm.reducer import GradientReducer

__all__ = [
    "Averaging",
    "GradientReducer",
    "ShardAveraging",
    "any_rank_",
    "broadcast_weights",
    "by_rank",
    "check_same",
    "give_back_to_ddp",
    "leave_to_ddp",
    "meet",
    "raise_together",
    "reduce_amax",
    "take_from_ddp",
]

"""Column Optimizer states: Adam and AdamW with low-bit states and one fused pass a step."""

from nemo_lowprec.optim.adam import Adam, AdamW, LowBitStates
from nemo_lowprec.optim.adopt import adopt, check_adoptable, release
from nemo_lowprec.optim.masters import MasterStep
from nemo_lowprec.optim.states import LowBitOptimizerStates, OptimizerStates, handles_found_inf, needs_closure
from nemo_lowprec.optim.storage import StateFormats

__all__ = [
    "Adam",
    "AdamW",
    "LowBitOptimizerStates",
    "LowBitStates",
    "MasterStep",
    "OptimizerStates",
    "StateFormats",
    "adopt",
    "check_adoptable",
    "handles_found_inf",
    "needs_closure",
    "release",
]

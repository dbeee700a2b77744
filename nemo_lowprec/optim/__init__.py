"""Column Optimizer states: Adam, AdamW, SGD, Lion and Muon with low-bit states and fused steps."""

from nemo_lowprec.optim.adam import Adam, AdamW
from nemo_lowprec.optim.adopt import adopt, check_adoptable, release
from nemo_lowprec.optim.lion import Lion
from nemo_lowprec.optim.low_bit import LowBitStates
from nemo_lowprec.optim.masters import MasterStep
from nemo_lowprec.optim.muon import Muon
from nemo_lowprec.optim.sgd import SGD
from nemo_lowprec.optim.states import LowBitOptimizerStates, OptimizerStates, handles_found_inf, needs_closure
from nemo_lowprec.optim.storage import StateFormats

__all__ = [
    "SGD",
    "Adam",
    "AdamW",
    "Lion",
    "LowBitOptimizerStates",
    "LowBitStates",
    "MasterStep",
    "Muon",
    "OptimizerStates",
    "StateFormats",
    "adopt",
    "check_adoptable",
    "handles_found_inf",
    "needs_closure",
    "release",
]

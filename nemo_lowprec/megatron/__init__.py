"""The levels on Megatron-core's engine: settings, optimizer, FP8 gradients, checkpoints.

``settings``, ``parallel`` and ``nemo`` need no Megatron-core; the other modules import it.
"""

from nemo_lowprec.megatron.parallel import ParallelLayout
from nemo_lowprec.megatron.settings import MegatronSettings, resolve

__all__ = ["MegatronSettings", "ParallelLayout", "resolve"]

"""Columns Weight and Master weight: half and FP8 copies of the parameters, and their FP32 masters."""

from nemo_lowprec.weights.masters import MasterWeights, master_of

__all__ = ["MasterWeights", "master_of"]

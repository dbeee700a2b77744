"""``prepare``: a level for training loops without a Trainer."""

from nemo_lowprec.loops.prepare import prepare

__all__ = ["prepare"]

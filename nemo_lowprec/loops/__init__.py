"""Training loops without a Trainer."""

from nemo_lowprec.loops.prepare import prepare

__all__ = ["prepare"]

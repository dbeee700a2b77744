"""MS-AMP's ``msamp.nn``: clipping of FP8 gradients, and DistributedDataParallel in ``msamp.nn.distributed``."""

from typing import NoReturn

from nemo_lowprec.grads import clip_grad_norm_
from nemo_lowprec.msamp.nn import distributed
from nemo_lowprec.msamp.refused import WAYS_OUT, refuse

__all__ = ["clip_grad_norm_", "distributed"]


def __getattr__(name: str) -> NoReturn:
    if f"nn.{name}" in WAYS_OUT:
        refuse(f"nn.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

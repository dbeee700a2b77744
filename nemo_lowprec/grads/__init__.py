"""Column Weight gradient: FP8 storage, clipping, loss scaling and unscaling, the search for non-finite gradients."""

from nemo_lowprec.grads.clip import clip_grad_norm_
from nemo_lowprec.grads.found_inf import FoundInf
from nemo_lowprec.grads.fp8_storage import Fp8Gradients
from nemo_lowprec.grads.loss_scale import LossScale
from nemo_lowprec.grads.true_gradients import TrueGradients, params_of
from nemo_lowprec.grads.unscale import find_nonfinite, unscale_

__all__ = [
    "FoundInf",
    "Fp8Gradients",
    "LossScale",
    "TrueGradients",
    "clip_grad_norm_",
    "find_nonfinite",
    "params_of",
    "unscale_",
]

"""MS-AMP's names that have no counterpart, each with the way out."""

from __future__ import annotations

from typing import NoReturn

_INITIALIZE = "Call msamp.initialize(model, optimizer, opt_level), which converts"
_SHARDED = "Use Lightning's Trainer with strategy='lowprec_sharded' and plugins=nemo_lowprec.msamp_o2()"
_DEEPSPEED = (
    "DeepSpeed's optimizers do not step on FP8 gradients. Use Lightning's Trainer with strategy='lowprec_sharded' and "
    "plugins=nemo_lowprec.msamp_o3(), or msamp.initialize(model, optimizer, 'O3') and DistributedDataParallel."
)
_FSDP = f"FullyShardedDataParallel cannot hold FP8 weights and FP8 gradients. {_SHARDED}."
_REPLACER = f"{_INITIALIZE} the linear layers and the optimizer together."
_PARAMETER = "A weight stays a torch.nn.Parameter that reads as FP32: test isinstance(weight, torch.nn.Parameter)."
_LAYER = f"{_INITIALIZE} linear layers; a converted layer is still a torch.nn.Linear."
_TE = "Pass the whole model to msamp.initialize(model, optimizer, opt_level, use_te=True)."

# by the name below ``msamp``
WAYS_OUT: dict[str, str] = {
    # modules
    "common": "Formats have names, as in msamp.optim.LBAdamW(exp_avg_dtype=torch.float32), and tensors are torch's: "
    "leave msamp.common out.",
    "deepspeed": _DEEPSPEED,
    "fsdp": _FSDP,
    "megatron": "Use nemo_lowprec.strategies.MegatronStrategy with plugins=nemo_lowprec.msamp_o2(half='fp16').",
    "operators": f"{_INITIALIZE} the layers that run the FP8 GEMMs.",
    "te": _TE,
    # names
    "DSAdam": _DEEPSPEED,
    "LinearReplacer": _REPLACER,
    "TeReplacer": _TE,
    "nn.FP8Linear": _LAYER,
    "nn.LinearReplacer": _REPLACER,
    "nn.ScalingModule": _LAYER,
    "nn.ScalingParameter": _PARAMETER,
    "nn.functional": "torch.nn.functional.linear computes in FP8 inside converted layers only. " + _LAYER,
    "nn.model_state": "The amax histories are in optimizer.state_dict()['fp8_histories'].",
    "optim.DSAdam": _DEEPSPEED,
    "optim.FSDPAdam": _FSDP,
    "optim.FSDPAdamW": _FSDP,
}


def refuse(name: str) -> NoReturn:
    """Raise ImportError for a key of ``WAYS_OUT``: an AttributeError's sentence would be lost in ``from … import``."""
    raise ImportError(f"nemo_lowprec has no msamp.{name}. {WAYS_OUT[name]}")

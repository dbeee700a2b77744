"""torch's DistributedDataParallel without its reducer, whose buckets can hold a parameter's own dtype only.

DDP goes on wrapping the model, broadcasting buffers and keeping ``no_sync``; gradients are averaged by
``GradientReducer``. DDP's buckets hold nothing but one FP32 number.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

__all__ = ["give_back_to_ddp", "leave_to_ddp", "take_from_ddp"]

_IGNORED = "_ddp_params_and_buffers_to_ignore"  # torch's; it flags the tensors, too
_BEFORE = "_lowprec_ignored_before"


def leave_to_ddp(model: nn.Module) -> None:
    """Before DDP wraps ``model``: have it ignore all parameters but one, without which it refuses to be built."""
    lazy = nn.parameter.UninitializedParameter  # which it must see, to refuse them
    params = {n: p for n, p in model.named_parameters(remove_duplicate=False) if not isinstance(p, lazy)}
    left = min((p for p in params.values() if p.requires_grad), key=lambda p: p.numel(), default=None)
    model.__dict__.setdefault(_BEFORE, list(getattr(model, _IGNORED, ())))
    ignored = {*model.__dict__[_BEFORE], *(n for n, p in params.items() if p is not left)}
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, list(ignored))


def give_back_to_ddp(model: nn.Module) -> None:
    """Undo ``leave_to_ddp``: another DDP around ``model`` ignores what its user wants ignored."""
    before = model.__dict__.pop(_BEFORE, None)
    if before is None:
        return
    for tensor in [*model.parameters(), *model.buffers()]:
        tensor.__dict__.pop("_ddp_ignored", None)
    delattr(model, _IGNORED)
    if before:
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, before)


def take_from_ddp(ddp: DistributedDataParallel) -> None:
    """Take that one from it too: its reducer gets a number in its place that no gradient ever comes for."""
    stand_in = torch.zeros(1, device=ddp.device, requires_grad=True)
    ddp._ddp_init_helper([stand_in], [False], {0: "stand_in"}, ddp.static_graph)

"""torch's DistributedDataParallel without its reducer, whose buckets have the dtype of the parameters.

DDP still wraps the model, broadcasts buffers and has ``no_sync``; ``GradientReducer`` averages the gradients. DDP's
reducer has one bucket, of one FP32 scalar.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from nemo_lowprec.compat.distributed import ignore_in_ddp, ignored_by_ddp, reduce_only

_BEFORE = "_lowprec_ignored_before"


def leave_to_ddp(model: nn.Module) -> None:
    """Make DDP, which will wrap ``model`` next, ignore all parameters but one.

    DDP refuses a module without trainable parameters; ``take_from_ddp`` takes the last parameter.
    """
    lazy = nn.parameter.UninitializedParameter  # DDP must see these parameters, to refuse them
    params = {n: p for n, p in model.named_parameters(remove_duplicate=False) if not isinstance(p, lazy)}
    left = min((p for p in params.values() if p.requires_grad), key=lambda p: p.numel(), default=None)
    before = model.__dict__.setdefault(_BEFORE, ignored_by_ddp(model))
    ignore_in_ddp(model, {*before, *(n for n, p in params.items() if p is not left)})


def give_back_to_ddp(model: nn.Module) -> None:
    """Undo ``leave_to_ddp``: a later DDP around ``model`` ignores the parameters that its user has named."""
    before = model.__dict__.pop(_BEFORE, None)
    if before is not None:
        ignore_in_ddp(model, before)


def take_from_ddp(ddp: DistributedDataParallel) -> None:
    """Give DDP's reducer a dummy scalar that never gets a gradient, in the place of its one parameter."""
    stand_in = torch.zeros(1, device=ddp.device, requires_grad=True, dtype=torch.float32)
    reduce_only(ddp, stand_in)

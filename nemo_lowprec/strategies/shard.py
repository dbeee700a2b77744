"""Cut a model into FSDP2 units: its blocks, and what is left."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method

from nemo_lowprec.chart import PrecisionLevel
from nemo_lowprec.engine import DTYPES

__all__ = ["blocks_of", "policy_for", "shard_model"]

_STEPS = ("training_step", "validation_step", "test_step", "predict_step")


def policy_for(level: PrecisionLevel) -> MixedPrecisionPolicy:
    """What FSDP2 gathers and reduces at ``level``; shards of MS-AMP's matrices see to themselves."""
    if not level.has_half_weights or level.is_low_bit:
        return MixedPrecisionPolicy(cast_forward_inputs=False)
    return MixedPrecisionPolicy(DTYPES[level.rest], DTYPES[level.comm], cast_forward_inputs=False)


def blocks_of(model: nn.Module) -> Iterator[nn.Module]:
    """The repeated blocks of ``model``: elements of its outermost lists of modules.

    A list, or an element, that is only a container has no forward that FSDP2 could hook into: it is descended into.
    """
    for child in model.children():
        if isinstance(child, nn.ModuleList | nn.ModuleDict):
            for element in child.children():
                if isinstance(element, nn.ModuleList | nn.ModuleDict):
                    yield from blocks_of(nn.ModuleList([element]))
                elif any(True for _ in element.children()) and any(True for _ in element.parameters()):
                    yield element
        else:
            yield from blocks_of(child)


def shard_model(
    model: nn.Module, mesh: DeviceMesh, device: torch.device, policy: MixedPrecisionPolicy, reshard: bool
) -> None:
    """Shard ``model`` over ``mesh`` block by block, with the weights of the first process, unless its user did.

    Args:
        mesh: of one dimension, or (replicate, shard).
        reshard: whether weights are freed between forward and backward (ZeRO-3) or kept (ZeRO-2).
    """
    if any(isinstance(m, FSDPModule) for m in model.modules()):
        return
    for unit in [*blocks_of(model), model]:
        unit.to(device)
        with torch.no_grad():
            for tensor in [*unit.parameters(), *unit.buffers()]:
                if not isinstance(tensor, torch.distributed.tensor.DTensor):
                    dist.broadcast(tensor.detach(), 0)
        fully_shard(unit, mesh=mesh, reshard_after_forward=reshard and unit is not model, mp_policy=policy)
    for name in _STEPS:
        if callable(getattr(model, name, None)):
            register_fsdp_forward_method(model, name)

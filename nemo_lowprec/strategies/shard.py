"""Cuts a model into FSDP2 units: its blocks, and the rest; or takes over the units that the user has made."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate, Shard

from nemo_lowprec.compat.distributed import fsdp_units
from nemo_lowprec.compat.tensors import tree_leaves
from nemo_lowprec.engine import Sharding
from nemo_lowprec.strategies.materialize import materialize
from nemo_lowprec.tensors.dtensor import is_sharded
from nemo_lowprec.weights import Fp32Weights
from nemo_lowprec.weights.widened import HALVES


def blocks_of(model: nn.Module) -> Iterator[nn.Module]:
    """The repeated blocks of ``model``: the elements of its outermost lists of modules.

    FSDP2 needs a ``forward`` to hook into: of an element that is a container itself, the elements are the blocks.
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


def sharding_over(mesh: DeviceMesh, frees_weights: bool) -> Sharding:
    """The process groups of a mesh with one dimension (shard) or two (replicate, shard)."""
    replicas = mesh.get_group(0) if mesh.ndim > 1 else None
    return Sharding(None, mesh.get_group(mesh.ndim - 1), replicas, frees_weights)


def mesh_of_units(model: nn.Module) -> DeviceMesh | None:
    """The mesh over which the user's ``fully_shard`` has sharded ``model``; None for a model without units.

    Raises:
        ValueError: a parameter is not sharded, sharded in another way (tensor parallelism), or over another mesh.
    """
    if not any(isinstance(m, FSDPModule) for m in model.modules()):
        return None
    found: DeviceMesh | None = None
    for name, param in model.named_parameters():
        if not is_sharded(param):
            raise ValueError(
                f"{name} is in no unit of FSDP2, and others are. Call fully_shard on the whole model last."
            )
        *outer, inner = param.placements  # type: ignore[attr-defined]
        if inner != Shard(0) or outer not in ([], [Replicate()]):
            raise ValueError(
                f"{name} is placed {param.placements}: lowprec_sharded takes parameters that are sharded along their "  # type: ignore[attr-defined]
                "first dimension, and whole copies of them. Leave tensor parallelism out."
            )
        if param.requires_grad and param.dtype in HALVES:
            raise ValueError(
                f"{name} is {str(param.dtype).removeprefix('torch.')} and sharded already: its shards would take their "
                "updates in 16 bits. Call model.float() before fully_shard."
            )
        if found is not None and param.device_mesh != found:  # type: ignore[attr-defined]
            raise ValueError(f"{name} is sharded over another mesh than the parameters before it. Use one mesh.")
        found = param.device_mesh  # type: ignore[attr-defined]
    return found


def take_over_units(model: nn.Module, policy: MixedPrecisionPolicy) -> None:
    """Give ``policy`` to the units that the user has made, so that they gather and reduce in the level's formats.

    Raises:
        ValueError: a unit has another policy.
    """
    for name, unit in fsdp_units(model):
        if unit.policy not in (MixedPrecisionPolicy(), policy):
            raise ValueError(
                f"{name or 'The model'} is sharded with mp_policy={unit.policy}, and the level decides on the "
                "dtypes. Leave mp_policy out."
            )
        unit.set_policy(policy)


_REFUSES = "_lowprec_refuses_second_derivatives"


def refuse_second_derivatives(model: nn.Module) -> None:
    """Make every unit of ``model`` raise in a backward pass with ``create_graph=True``.

    FSDP2 frees a unit's weights after the backward pass, and the second derivative would read freed memory.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule) and _REFUSES not in module.__dict__:
            module.register_forward_hook(_watch_output)
            module.__dict__[_REFUSES] = True


def _watch_output(module: nn.Module, args: Any, output: Any) -> None:
    for leaf in tree_leaves(output):
        if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
            leaf.register_hook(_raise_if_differentiated_again)


def _raise_if_differentiated_again(_: torch.Tensor) -> None:
    if torch.is_grad_enabled():
        raise RuntimeError(
            "lowprec_sharded frees weights after a backward pass, and a second derivative (create_graph=True) needs "
            "them. Use lowprec_ddp or ddp."
        )


def shard_model(
    model: nn.Module, mesh: DeviceMesh, device: torch.device, policy: MixedPrecisionPolicy, reshard: bool
) -> None:
    """Shard ``model`` over ``mesh`` block by block, with the weights of the first process.

    Tensors on torch's meta device get memory, and the first process initializes their modules; call
    ``materialize.obstacle`` before.

    Args:
        mesh: with one dimension (shard) or two (replicate, shard).
        policy: dtypes in which FSDP2 gathers and reduces.
        reshard: whether weights are freed between forward and backward (ZeRO-3) or kept (ZeRO-2).
    """
    for unit in [*blocks_of(model), model]:
        materialize(unit, device, initializes=dist.get_rank() == 0)
        unit.to(device)
        Fp32Weights().install(unit, training=True)  # a shard is the master
        with torch.no_grad():
            for tensor in [*unit.parameters(), *unit.buffers()]:
                if not isinstance(tensor, torch.distributed.tensor.DTensor):
                    dist.broadcast(tensor.detach(), 0)
        fully_shard(unit, mesh=mesh, reshard_after_forward=reshard and unit is not model, mp_policy=policy)

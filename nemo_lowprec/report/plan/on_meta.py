"""Copies a model to torch's meta device, where parameters take no memory, and converts the copy."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from nemo_lowprec.engine import Engine, Sharding
from nemo_lowprec.models.optimizer import muon_groups
from nemo_lowprec.report.parts import Parts, converted_weights, frozen_part, parts_of
from nemo_lowprec.report.plan.on_gpu import PlannedEngine


def copy_on_meta(model: nn.Module) -> nn.Module:
    """A copy of ``model`` whose parameters and buffers are on torch's meta device.

    Raises:
        ValueError: ``model`` is converted already, or has no parameters (yet).
    """
    return copy_with(model, lambda tensor: tensor.to("meta"))


def copy_with(model: nn.Module, form: Callable[[Tensor], Tensor]) -> nn.Module:
    """A copy of ``model`` in which ``form`` has made the values of each parameter and buffer; its Trainer is left out.

    Raises:
        ValueError: ``model`` is converted already, or has no parameters (yet).
    """
    if Engine.of(model) is not None:
        raise ValueError("This model is converted already. Plan with it as it was before.")
    tensors = [*model.parameters(), *model.buffers()]
    if not tensors:
        raise ValueError("This model has no parameters (yet): a LightningModule may need its configure_model() first.")
    memo: dict[int, Any] = {id(t): _formed(t, form) for t in tensors}
    trainers = [trainer for module in model.modules() if (trainer := vars(module).get("_trainer")) is not None]
    return copy.deepcopy(model, memo | {id(trainer): None for trainer in trainers})


def _formed(tensor: Tensor, form: Callable[[Tensor], Tensor]) -> Tensor:
    twin = form(tensor).detach()
    return nn.Parameter(twin, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else twin


def settle_on_meta(twin: nn.Module, engine: Engine, sharded: bool, on_gpu: bool = False) -> Engine:
    """Convert ``twin``, of ``copy_on_meta``, in place by an engine like ``engine``, which is returned.

    Parameters are then stored in the level's formats. With ``sharded`` they keep the model's formats, because FSDP2
    shards parameters before shards are stored. ``on_gpu`` converts layers as a GPU takes them.
    """
    kind = PlannedEngine if on_gpu else Engine
    meta = kind(replace(engine.options, loss_scale=None, backend="reference"), engine.reads_as)
    meta.sharding = Sharding(None, None) if sharded else None
    meta.convert(twin, torch.device("cuda" if on_gpu else "cpu"))
    meta.columns.computation.device = torch.device("cpu")  # of its tables
    if not sharded:
        meta.settle()
    return meta


def planned_parts(model: nn.Module, engine: Engine) -> Parts:
    """All parameters of a converted model; frozen ones in parts of their own."""
    conversion = engine.columns.computation.conversion
    trained = [p for p in model.parameters() if p.requires_grad]
    parts = parts_of(engine.level, trained, converted_weights(model, engine.level, conversion))
    for param in model.parameters():
        if not param.requires_grad:
            parts.setdefault(frozen_part(param), []).append(param)
    return parts


def planned_moments(model: nn.Module) -> dict[int, tuple[str, ...]]:
    """The names of the moments of each parameter, by its id, where a CausalLM's optimizer is another one than AdamW."""
    kind = (vars(model).get("_hparams") or {}).get("optimizer", "adamw")
    params: Iterable[nn.Parameter] = model.parameters()
    if kind == "muon":
        params = muon_groups(model)[0]["params"]
    name = {"lion": "exp_avg", "sgd": "momentum_buffer", "muon": "momentum_buffer"}.get(kind)
    return {} if name is None else {id(param): (name,) for param in params}

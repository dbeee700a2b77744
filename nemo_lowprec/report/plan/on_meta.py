"""Converts a copy of a model on torch's meta device, where parameters take no memory."""

from __future__ import annotations

import copy
from dataclasses import replace

import torch
from torch import Tensor, nn

from nemo_lowprec.engine import Engine, Sharding
from nemo_lowprec.report.parts import ModelPart, converted_weights, parts_of
from nemo_lowprec.report.plan.on_gpu import PlannedEngine


def settled_on_meta(
    model: nn.Module, engine: Engine, sharded: bool, on_gpu: bool = False
) -> tuple[nn.Module, Engine]:  # fmt: skip
    """A copy of ``model`` on torch's meta device, and an engine like ``engine`` that converted it.

    The copy's parameters are stored in the level's formats. With ``sharded`` they keep the model's formats, because
    FSDP2 shards parameters before shards are stored. ``on_gpu`` converts layers as a GPU takes them.

    Raises:
        ValueError: ``model`` is converted already, or has no parameters (yet).
    """
    if Engine.of(model) is not None:
        raise ValueError("This model is converted already. Plan with it as it was before.")
    if not [*model.parameters(), *model.buffers()]:
        raise ValueError("This model has no parameters (yet): a LightningModule may need its configure_model() first.")
    twin = copy_on_meta(model)
    kind = PlannedEngine if on_gpu else Engine
    meta = kind(replace(engine.options, loss_scale=None, backend="reference"), engine.reads_as)
    meta.sharding = Sharding(None, None) if sharded else None
    meta.convert(twin, torch.device("cuda" if on_gpu else "cpu"))
    meta.columns.computation.device = torch.device("cpu")  # of its tables
    if not sharded:
        meta.settle()
    return twin, meta


def copy_on_meta(model: nn.Module) -> nn.Module:
    """A copy of ``model`` whose parameters and buffers are on torch's meta device."""
    return copy.deepcopy(model, {id(t): _on_meta(t) for t in [*model.parameters(), *model.buffers()]})


def _on_meta(tensor: Tensor) -> Tensor:
    twin = tensor.detach().to("meta")
    return nn.Parameter(twin, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else twin


def planned_parts(model: nn.Module, engine: Engine) -> list[ModelPart]:
    """All parameters of a converted model, frozen ones too."""
    return parts_of(
        engine.level, model.parameters(), converted_weights(model, engine.level, engine.columns.computation.conversion)
    )

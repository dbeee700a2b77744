"""A level at work on a copy of a model without memory: which layers it converts, and what it would store."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from nemo_lowprec.compute import linear_weights
from nemo_lowprec.engine import Engine, Sharding
from nemo_lowprec.report.plan.on_gpu import PlannedEngine

__all__ = ["ModelPart", "copy_on_meta", "parts_of", "settled_on_meta"]


@dataclass(frozen=True)
class ModelPart:
    """Parameters that a level treats alike.

    Attributes:
        name: ``converted`` weights (all linear weights at a level that converts none), the ``rest``, and ``vectors``
            (fewer than two dimensions) at a level that keeps these apart; as in ``audit``.
        params: each once.
    """

    name: str
    params: tuple[nn.Parameter, ...]


def settled_on_meta(
    model: nn.Module, engine: Engine, sharded: bool, on_gpu: bool = False
) -> tuple[nn.Module, Engine]:  # fmt: skip
    """A copy of ``model`` on torch's meta device, and an engine like ``engine`` that converted it.

    The copy's parameters are stored as they would be for training, but where they are ``sharded``: then they are as
    they were before. ``on_gpu`` converts layers as a GPU takes them.

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


def parts_of(model: nn.Module, engine: Engine) -> Iterator[ModelPart]:
    """The parameters of a converted model, by what becomes of them."""
    low = [model.get_parameter(name) for name in engine.columns.computation.conversion.weights]
    converted = {id(w): w for w in (low if engine.level.has_fp8 else linear_weights(model).values())}
    rest = [p for p in model.parameters() if id(p) not in converted]
    yield ModelPart("converted", tuple(converted.values()))
    if engine.level.vectors is None:
        yield ModelPart("rest", tuple(rest))
        return
    yield ModelPart("rest", tuple(p for p in rest if p.dim() > 1))
    yield ModelPart("vectors", tuple(p for p in rest if p.dim() < 2))

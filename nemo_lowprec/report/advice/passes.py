"""Passes of a batch through a copy of the user's model; the model itself, its gradients and the RNGs stay as they are.

The copy has parameters in BF16. Operands are looked at in a copy that the engine has converted, with all GEMMs in half
precision: its layers have the names that ``skip`` takes, and announce their operands.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from nemo_lowprec.chart import get_level
from nemo_lowprec.chart.options import parse_options
from nemo_lowprec.chart.recipe import Recipe
from nemo_lowprec.compat.autograd import current_backward
from nemo_lowprec.compat.tensors import tree_map
from nemo_lowprec.compute import gemm_plans
from nemo_lowprec.compute.speed_filter import Calls
from nemo_lowprec.engine import Engine
from nemo_lowprec.formats.errors import Errors
from nemo_lowprec.report.advice.measuring import release
from nemo_lowprec.report.advice.operands import OperandErrors, Rounded
from nemo_lowprec.report.loss import loss_of
from nemo_lowprec.report.plan.on_meta import copy_with

T = TypeVar("T")
# Which take parameters in the dtype of their statistics.
_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
_LEVEL = "te_fp8"  # whose FP32 weights hold any value, and which needs no masters


@dataclass(frozen=True)
class Seen:
    """The findings of one pass.

    Attributes:
        errors: by layer, operand and way of scaling.
        calls: of the converted layers.
        layers: the names of the converted layers.
    """

    errors: dict[Rounded, Errors]
    calls: Calls
    layers: list[str]

    @property
    def ways(self) -> list[str]:
        """The ways of scaling in ``errors``."""
        return list(dict.fromkeys(key.scaling for key in self.errors))


class _Calls(Calls):
    """Counts the forward GEMM alone where activation checkpointing calls a layer again in backward."""

    def see(self, name: str, x: Tensor, outs: int, wgrad: bool) -> None:
        super().see(name, x, outs, wgrad)
        if current_backward() != -1:
            self._open[-1] = self._open[-1]._replace(dgrad=False, wgrad=False)


def device_of(model: nn.Module) -> torch.device:
    """The GPU of the model, else a GPU of this machine, else the CPU."""
    own = next((p.device for p in model.parameters() if p.is_cuda), None)
    if own is not None:
        return own
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def half_copy(model: nn.Module, device: torch.device) -> nn.Module:
    """A copy of ``model`` on ``device`` with parameters in BF16; batch norms and buffers keep their dtype."""
    kept = {id(p) for m in model.modules() if isinstance(m, _BATCH_NORMS) for p in m.parameters(recurse=False)}

    def form(tensor: Tensor) -> Tensor:
        half = isinstance(tensor, nn.Parameter) and tensor.is_floating_point() and id(tensor) not in kept
        return tensor.detach().to(device, torch.bfloat16 if half else tensor.dtype, copy=True)

    return copy_with(model, form).to(device)  # which tells a LightningModule its device


def on_copy(model: nn.Module, device: torch.device, run: Callable[[nn.Module], T]) -> T | None:
    """The result of ``run`` on a ``half_copy`` of ``model``, freed afterwards; None where the GPU lacks the memory."""
    result = None
    with suppress(torch.OutOfMemoryError):
        result = run(half_copy(model, device))
    release()  # a converted model refers to itself
    return result


@contextmanager
def random_states_kept(device: torch.device) -> Iterator[None]:
    """Context after which the RNGs of the CPU and of ``device`` are as they were."""
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        yield


@contextmanager
def without_log() -> Iterator[None]:
    """Context in which this package logs warnings alone: each level would tell of its backend and its layers."""
    log = logging.getLogger("nemo_lowprec")
    level = log.level
    log.setLevel(logging.WARNING)
    try:
        yield
    finally:
        log.setLevel(level)


def on_device(batch: Any, device: torch.device) -> Any:
    """``batch`` with its tensors on ``device``."""
    return tree_map(lambda leaf: leaf.to(device) if isinstance(leaf, Tensor) else leaf, batch)


def look(copy: nn.Module, batch: Any, recipes: Mapping[str, Recipe]) -> Seen:
    """Pass ``batch`` forward and backward through ``copy``, which is converted, and look at operands and calls.

    Args:
        copy: of ``half_copy``.
        batch: on the device of ``copy``.
        recipes: as for ``OperandErrors``.

    Raises:
        ValueError: no layer can be converted, or the forward pass gives no loss.
    """
    device = next(copy.parameters()).device
    options = {"override_linear_precision": (True,) * 3, "graphs": False, "convert": None}
    engine = Engine(parse_options(get_level(_LEVEL), options))
    engine.convert(copy, device)
    engine.settle()
    layers, calls = list(engine.columns.computation.conversion.low), _Calls()
    errors = OperandErrors(recipes, layers)
    for module in copy.modules():
        for plan in gemm_plans(module).values():
            if plan.recipe is not None:
                plan.calls = calls
    for param in copy.parameters():
        if param.requires_grad:
            param.register_post_accumulate_grad_hook(_free)
    with engine.observers.watched_by(errors):
        with engine.forward_context():
            loss = loss_of(copy, batch)
        with engine.backward_context():
            loss.backward()  # type: ignore[no-untyped-call]
    calls.close()
    return Seen(errors.read(), calls, layers)


def _free(param: Tensor) -> None:
    param.grad = None  # nobody reads it

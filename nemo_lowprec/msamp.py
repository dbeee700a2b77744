"""MS-AMP's call for a training loop without Lightning: the same engine, driven by the loop's own lines.

``from nemo_lowprec import msamp`` takes the place of ``import msamp``. (The module cannot have the function's name:
importing it would hide ``nemo_lowprec.initialize``.)

``autocast``, ``GradScaler``, schedulers and ``DistributedDataParallel`` of torch work as they do on any model.
"""

from __future__ import annotations

import logging
import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from nemo_lowprec.chart import get_level
from nemo_lowprec.compute import is_converted
from nemo_lowprec.compute.attention import prefer_attention_in
from nemo_lowprec.engine import Engine
from nemo_lowprec.grads import clip_grad_norm_
from nemo_lowprec.loops.plain_loop import PlainLoop, UnderDDP, refuse_sharded
from nemo_lowprec.options import parse_options
from nemo_lowprec.tensors import QuantizedTensor

__all__ = ["OPT_LEVELS", "clip_grad_norm_", "initialize"]

log = logging.getLogger("nemo_lowprec")

OPT_LEVELS = {"O1": "msamp_o1", "O2": "msamp_o2", "O3": "msamp_o3"}


def initialize(
    model: nn.Module,
    optimizer: Optimizer | None = None,
    opt_level: str = "O1",
    use_te: bool | None = None,
    **options: Any,
) -> tuple[nn.Module, Optimizer]:
    """Prepare a model and its optimizer for FP8 training, both in place.

    Linear layers compute in FP8; matrices are stored in FP16 (O1, O2) or FP8 with FP16 masters (O3) and read as FP32,
    so that modules and ``autocast`` treat them as before; gradients are stored in FP8; the optimizer's states are
    FP32 (O1) or FP8 and FP16 (O2, O3).

    Which layers and matrices that are is logged, by the logger ``nemo_lowprec`` and at INFO; a model of whose matrices
    less than half is in converted layers is warned of.

    Call it once the model is on its device, before ``DistributedDataParallel``, which then averages gradients in
    FP8. Without DDP call ``optimizer.all_reduce_grads(model)`` between ``backward`` and ``step``: the first call gives
    every process the weights and buffers of the group's first one, as DDP does when it wraps a model. Processes that
    never call it, such as those that train different models, stay apart.

    Args:
        model: any module.
        optimizer: torch's Adam or AdamW over its parameters; None for AdamW with torch's defaults.
        opt_level: ``O1``, ``O2`` or ``O3``.
        use_te: whether Transformer Engine runs the GEMMs; None where it can.
        options: the FP8 and layer arguments of ``nemo_lowprec.msamp_o1``, ``stochastic_rounding``,
            ``gradient_release``.

    Returns:
        The model and the optimizer: those given, with the method ``all_reduce_grads(model)`` on the latter.

    Raises:
        ValueError: an unknown level, an optimizer without a low-bit form or of another model's parameters, a model
            that is converted already or sharded, or a value that an option does not take; model and optimizer are as
            they were.
        TypeError: an unknown option.

    Source: MS-AMP's ``msamp.initialize``.
    """
    if not isinstance(opt_level, str) or opt_level not in OPT_LEVELS:
        raise ValueError(f"opt_level={opt_level!r} must be one of: {', '.join(OPT_LEVELS)}.")
    if not isinstance(model, nn.Module):
        raise ValueError(f"model must be a torch.nn.Module, not {type(model).__name__}.")
    if isinstance(model, DistributedDataParallel):
        raise ValueError("Call initialize before DistributedDataParallel wraps the model.")
    refuse_sharded(model)
    if is_converted(model) or any(isinstance(p, QuantizedTensor) for p in model.parameters()):
        raise ValueError("This model is converted already: call initialize once, on the plain model.")
    engine = _engine(opt_level, use_te, _device_of(model), options)
    if optimizer is None:
        optimizer = torch.optim.AdamW(model.parameters())
    if type(optimizer).__module__.partition(".")[0] == "accelerate":
        raise ValueError(
            f"This optimizer is an {type(optimizer).__name__}, and may step with methods that it took from torch's "
            "before. Call initialize first, and accelerator.prepare on what it returns."
        )
    engine.check_optimizer(optimizer)
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    if not any(id(p) in held for p in model.parameters()):
        raise ValueError(f"This {type(optimizer).__name__} holds none of the model's parameters.")
    engine.convert(model, _device_of(model))
    engine.settle()
    engine.attach(optimizer)
    model.zero_grad()  # gradients that were there belong to the weights before they were rounded
    prefer_attention_in(model, engine.options.attention)
    PlainLoop(engine, model, optimizer)
    UnderDDP(engine, model)
    _say_what_is_converted(engine)
    return model, optimizer


def _engine(opt_level: str, use_te: bool | None, device: torch.device, options: dict[str, Any]) -> Engine:
    for name in ("half", "loss_scale", "initial_loss_scale", "loss_scale_window", "hysteresis", "min_loss_scale"):
        if name in options:
            raise TypeError(
                f"initialize takes no {name!r}: torch.autocast chooses the half format, and GradScaler the loss scale."
            )
    if use_te is not None:
        if "backend" in options:
            raise ValueError("use_te and backend choose the same thing: pass one of them.")
        without = "torch" if device.type == "cuda" else "reference"
        options = {**options, "backend": "te" if use_te else without}
    return Engine(parse_options(get_level(OPT_LEVELS[opt_level]), options), torch.float32)


def _say_what_is_converted(engine: Engine) -> None:
    """Log the table of layers and matrices, and warn where hardly anything is converted; on the first process."""
    found = engine.columns.computation.describe()
    if found is None or (dist.is_initialized() and dist.get_rank()):
        return
    table, problem = found
    if log.isEnabledFor(logging.INFO):
        log.info("%s\n%s", engine.level.name, table)
    if problem:
        warnings.warn(problem, stacklevel=3)


def _device_of(model: nn.Module) -> torch.device:
    param = next(model.parameters(), None)
    return torch.device("cpu") if param is None else param.device

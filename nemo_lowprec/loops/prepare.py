"""``prepare``: converts a model and its optimizer to a level, for a training loop without Lightning."""

from __future__ import annotations

import logging
import warnings
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from nemo_lowprec.chart import PrecisionLevel, get_level, preset_of
from nemo_lowprec.chart.groups import LossScaleConfig
from nemo_lowprec.chart.options import Options, parse_options
from nemo_lowprec.compute import is_converted
from nemo_lowprec.compute.attention import prefer_attention_in
from nemo_lowprec.compute.half_layers import autocast_forward
from nemo_lowprec.engine import Engine
from nemo_lowprec.loops.plain_loop import PlainLoop, UnderDDP, refuse_sharded
from nemo_lowprec.tensors import QuantizedTensor

log = logging.getLogger("nemo_lowprec")


def prepare(
    model: nn.Module,
    optimizer: Optimizer | None = None,
    level: str | PrecisionLevel = "bf16_with_fp8_mixed",
    **options: Any,
) -> tuple[nn.Module, Optimizer]:
    """Prepare a model and its optimizer for training at a level, both in place.

    Where the loop has autocast off, the model's forward runs under autocast to the level's half format and returns
    FP32. At the MS-AMP levels, whose weights read as FP32, only the loop turns autocast on. Weights, gradients and
    optimizer states are stored in the level's formats, and the optimizer steps on masters where the level has masters.
    ``torch.amp.GradScaler``, schedulers, ``clip_grad_norm_`` and gradient accumulation work as on any model.

    The logger ``nemo_lowprec`` logs a table of layers and matrices at INFO, and with ``convert="auto"`` once more after
    the first step. A warning tells where converted layers hold less than half of the model's matrices.

    Call ``prepare`` once the model is on its device, before ``DistributedDataParallel``, which then averages gradients
    in the level's format. Without DDP call ``optimizer.all_reduce_grads(model)`` between ``backward`` and ``step``: the
    first call gives every process the weights and buffers of the group's first process. Processes that never call it,
    such as those that train different models, stay apart.

    Args:
        model: any module.
        optimizer: any of torch's over the model's parameters (where the level has low-bit states Adam, AdamW, SGD or
            Muon, or this package's Lion or Muon); None for AdamW with torch's defaults.
        level: name of the level, an alias (``chart.ALIASES``), or a row of your own.
        options: the arguments of the level (as of ``nemo_lowprec.bf16_with_fp8_mixed``), except ``half`` and the loss
            scale: here ``torch.autocast`` chooses the half format, and ``GradScaler`` the loss scale.

    Returns:
        The same model and the same optimizer, which now has the method ``all_reduce_grads(model)``.

    Raises:
        ValueError: an unknown level, an optimizer without a low-bit form or of another model's parameters, a model
            that is converted already or sharded, or a value that an option does not take; model and optimizer are not
            changed.
        TypeError: an unknown option.
    """
    for name in ("half", *LossScaleConfig.arguments()):
        if name in options:
            raise TypeError(
                f"A loop takes no {name!r}: torch.autocast chooses the half format, and GradScaler the loss scale."
            )
    parsed = parse_options(get_level(level), preset_of(level) | options)
    return prepare_parsed(model, optimizer, parsed, torch.float32 if parsed.level.is_low_bit else None)


def prepare_parsed(
    model: nn.Module, optimizer: Optimizer | None, parsed: Options, reads_as: torch.dtype | None = None
) -> tuple[nn.Module, Optimizer]:
    """``prepare`` with checked arguments.

    Args:
        reads_as: dtype that weights stored in FP16 read as, in a loop that turns autocast on; None: the level's half
            dtype, under autocast to which every forward pass then runs.
    """
    if not isinstance(model, nn.Module):
        raise ValueError(f"model must be a torch.nn.Module, not {type(model).__name__}.")
    if isinstance(model, DistributedDataParallel):
        raise ValueError("Prepare the model before DistributedDataParallel wraps it.")
    refuse_sharded(model)
    if is_converted(model) or any(isinstance(p, QuantizedTensor) for p in model.parameters()):
        raise ValueError(
            "This model is converted already: prepare the plain model, once. To train it anew, load its state_dict() "
            "into a new model."
        )
    engine = Engine(replace(parsed, loss_scale=None), reads_as)
    if optimizer is None:
        optimizer = torch.optim.AdamW(model.parameters())
    if type(optimizer).__module__.partition(".")[0] == "accelerate":
        raise ValueError(
            f"This optimizer is an {type(optimizer).__name__}, and may step with methods that it took from torch's "
            "before. Prepare the model and its optimizer first, and then call accelerator.prepare on both."
        )
    engine.check_optimizer(optimizer)
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    if not any(id(p) in held for p in model.parameters()):
        raise ValueError(f"This {type(optimizer).__name__} holds none of the model's parameters.")
    engine.convert(model, next((param.device for param in model.parameters()), torch.device("cpu")))
    engine.settle()
    engine.attach(optimizer)
    model.zero_grad()  # present gradients belong to the weights before the rounding
    prefer_attention_in(model, parsed.attention)
    PlainLoop(engine, model, optimizer)
    UnderDDP(engine, model)
    if reads_as is None:
        autocast_forward(model, engine.half)
    say_what_is_converted(engine)
    engine.columns.computation.when_decided = partial(say_what_is_converted, engine)
    return model, optimizer


def say_what_is_converted(engine: Engine) -> None:
    """On the first process, log the table of layers and matrices, and warn where few matrices are converted."""
    found = engine.columns.computation.describe()
    if found is None or (dist.is_initialized() and dist.get_rank()):
        return
    table, problem = found
    if log.isEnabledFor(logging.INFO):
        log.info("%s\n%s", engine.level.name, table)
    if problem:
        warnings.warn(problem, stacklevel=5)

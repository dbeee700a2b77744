"""A model and its optimizers at a level, for the loop of an ``accelerate.Accelerator``."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NoReturn
from weakref import ref

import torch
from torch import nn
from torch.optim import Optimizer

from nemo_lowprec.chart import PrecisionLevel, get_level, preset_of
from nemo_lowprec.chart.groups import LossScaleConfig
from nemo_lowprec.chart.options import parse_options
from nemo_lowprec.compat.accelerate import note_skipped
from nemo_lowprec.engine import Engine
from nemo_lowprec.loops.fp8_settings import level_of
from nemo_lowprec.loops.prepare import prepare_parsed

_TRAINED = ("NO", "MULTI_CPU", "MULTI_GPU")  # of Accelerate's ``DistributedType``
_RECIPES = ("fp8_recipe_handler", "te_recipe_handler", "msamp_recipe_handler", "ao_recipe_handler")
_BACKEND = "ACCELERATE_FP8_BACKEND"


def refuse_engines(accelerator: Any) -> None:
    """Raise ValueError where ``accelerator`` trains with FSDP, DeepSpeed, Megatron-LM or a ``ParallelismConfig``."""
    kind = accelerator.distributed_type.value
    if kind in _TRAINED and getattr(accelerator, "parallelism_config", None) is not None:
        kind = "ParallelismConfig"
    if kind not in _TRAINED:
        raise ValueError(
            f"The levels train on one device and with DistributedDataParallel, and not with Accelerate's {kind}. To "
            "shard the model use Lightning's Trainer with strategy='lowprec_sharded'."
        )


def choose(
    accelerator: Any, level: str | PrecisionLevel | None, options: dict[str, Any]
) -> tuple[PrecisionLevel, dict[str, Any]]:
    """The row and the arguments that the user, or an Accelerator with ``mixed_precision="fp8"``, asks for.

    Raises:
        ValueError: see ``refuse_engines``; both or none of the two name a level, or the level and its ``half`` do not
            agree with ``mixed_precision``; ``level_of`` and ``get_level`` raise others.
        TypeError: arguments of the loss scale, which is ``GradScalerKwargs``'s.
    """
    refuse_engines(accelerator)
    for name in LossScaleConfig.arguments():
        if name in options:
            raise TypeError(f"An Accelerator takes no {name!r}: the loss scale is that of its GradScalerKwargs.")
    precision = str(accelerator.mixed_precision)
    if precision == "fp8":
        if level is not None:
            raise ValueError(
                "Accelerator(mixed_precision='fp8') has its own FP8 recipe. Leave the level out, and the recipe "
                "chooses the level, or write mixed_precision='bf16'."
            )
        level, found = level_of(next(filter(None, (getattr(accelerator, name) for name in _RECIPES))))
        options = {**found, **options}
    elif level is None:
        raise ValueError(
            "The Accelerator has no FP8 recipe that would choose the level. Name one, such as "
            "level='bf16_with_fp8_mixed'."
        )
    row = get_level(level)
    options = preset_of(level) | options
    half = options.pop("half", None) if row.half else None
    row = row.with_half(half or ("fp16" if row.half and precision == "fp16" else row.autocast))
    if row.has_loss_scale and precision != "fp16":
        raise ValueError(
            f"{row.name} computes in FP16 and scales the loss: it trains with Accelerator(mixed_precision='fp16'), "
            f"which brings a GradScaler, and not with {precision!r}."
        )
    if not row.has_loss_scale and precision == "fp16":
        raise ValueError(
            f"{row.name} computes in BF16: it trains with Accelerator(mixed_precision='bf16') or 'no', and not with "
            "'fp16'."
        )
    return row, options


def check_options(accelerator: Any, row: PrecisionLevel, options: dict[str, Any]) -> None:
    """Raise ValueError where an option of ``accelerator`` would have no effect."""
    handler = accelerator.ddp_handler
    if handler is not None and str(handler.comm_hook.value) != "no":
        raise ValueError(
            f"comm_hook={handler.comm_hook.value!r} would have no effect: {row.name} averages gradients in "
            f"{row.comm.upper()} itself. Leave it out."
        )
    if options.get("gradient_release") and accelerator.gradient_accumulation_steps > 1:
        raise ValueError(
            "gradient_release=True steps in every backward pass: gradient_accumulation_steps must be 1. Leave one of "
            "them out."
        )


def scale_loss(accelerator: Any, row: PrecisionLevel) -> None:
    """Give ``accelerator`` a GradScaler where ``row`` needs one, and none elsewhere.

    Accelerate has no GradScaler on a CPU with ``mixed_precision="fp16"``, and one beside BF16 for MS-AMP's own
    optimizers.
    """
    if not row.has_loss_scale:
        accelerator.scaler = None
    elif accelerator.scaler is None:
        handler = accelerator.scaler_handler
        accelerator.scaler = torch.amp.GradScaler(accelerator.device.type, **(handler.to_kwargs() if handler else {}))
        accelerator.native_amp = True  # without it gradients are clipped while they are scaled


def convert(
    accelerator: Any,
    model: nn.Module,
    optimizers: Sequence[Optimizer | None],
    row: PrecisionLevel,
    options: dict[str, Any],
) -> Optimizer:
    """Prepare a plain ``model`` and its ``optimizers`` in place, before ``accelerator.prepare``; returns the first."""
    if accelerator.device_placement and not accelerator.verify_device_map(model):
        model.to(accelerator.device)
    _, first = prepare_parsed(model, optimizers[0], parse_options(row, options))
    engine = Engine.of(model)
    assert engine is not None
    held = {id(param) for param in model.parameters()}
    scale_loss(accelerator, row)
    for own in [first, *filter(None, optimizers[1:])]:
        if any(id(param) in held for group in own.param_groups for param in group["params"]):
            join(accelerator, engine, own)
    if engine.options.low_bit.gradient_release:
        for name in ("clip_grad_norm_", "clip_grad_value_"):
            setattr(accelerator, name, partial(_clip, getattr(accelerator, name), ref(model)))
    if accelerator.use_distributed:
        accelerator.trigger_sync_in_backward = accelerator.join_uneven_inputs = _refuse
    return first


def join(accelerator: Any, engine: Engine, optimizer: Optimizer) -> None:
    """Have ``optimizer``, which no Accelerator has prepared, step on the model of ``engine``."""
    if optimizer not in engine.optimizers:
        assert engine.when_adopted is not None
        engine.attach(optimizer)
        engine.when_adopted(optimizer)
    if accelerator.scaler is not None:
        optimizer.register_step_post_hook(_TellsOfSkippedSteps(accelerator))


class _TellsOfSkippedSteps:
    """Hook after a step: tells the Accelerator where the kernel of a fused optimizer has skipped."""

    def __init__(self, accelerator: Any) -> None:
        self._accelerator = ref(accelerator)

    def __call__(self, optimizer: Optimizer, *_: Any) -> None:
        found, accelerator = getattr(optimizer, "found_inf", None), self._accelerator()
        if accelerator is not None and isinstance(found, torch.Tensor) and found.item():
            note_skipped(accelerator, optimizer)


def _clip(clip: Callable[..., Any], made: ref[nn.Module], parameters: Any, *args: Any, **kwargs: Any) -> Any:
    """``clip(parameters)``, refused for parameters of the model ``made()``, which ``gradient_release`` has stepped."""
    given, model = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters), made()
    held = {id(param) for param in model.parameters()} if model is not None else set()
    if any(id(param) in held for param in given):
        raise ValueError(
            "gradient_release=True has stepped each parameter before all gradients are there to be clipped. Leave out "
            "gradient_release or the clipping."
        )
    return clip(given, *args, **kwargs)


def _refuse(*_: Any, **__: Any) -> NoReturn:
    raise ValueError(
        "trigger_sync_in_backward and join_uneven_inputs do not reach gradients that the level averages itself. "
        "Compute the last micro-batch outside of no_sync, and give every process as many batches."
    )


@contextmanager
def without_own_fp8(accelerator: Any) -> Iterator[None]:
    """Context in which ``accelerator.prepare`` converts no layers itself. The recipe that chose the level is gone."""
    accelerator.has_fp8_handler = False
    launched = os.environ.pop(_BACKEND, None)
    try:
        yield
    finally:
        if launched is not None:
            os.environ[_BACKEND] = launched

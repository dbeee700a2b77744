"""MS-AMP's call for a training loop without Lightning: the same engine, driven by the loop's own lines.

``from nemo_lowprec import msamp`` takes the place of ``import msamp``. (The module cannot have the function's name:
importing it would hide ``nemo_lowprec.initialize``.)

``autocast``, ``GradScaler``, schedulers and ``DistributedDataParallel`` of torch work as they do on any model.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from nemo_lowprec.chart import get_level
from nemo_lowprec.comm import average_gradients, broadcast_weights
from nemo_lowprec.compute import is_converted
from nemo_lowprec.engine import Engine
from nemo_lowprec.grads import clip_grad_norm_
from nemo_lowprec.options import parse_options

__all__ = ["OPT_LEVELS", "clip_grad_norm_", "initialize"]

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

    Call it once the model is on its device, before ``DistributedDataParallel``, which then averages gradients in
    FP8. Without DDP call ``optimizer.all_reduce_grads(model)`` between ``backward`` and ``step``.

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
        ValueError: an unknown level, an optimizer without a low-bit form, a model that is converted already, or a
            value that an option does not take; model and optimizer are as they were.
        TypeError: an unknown option.

    Source: MS-AMP's ``msamp.initialize``.
    """
    if opt_level not in OPT_LEVELS:
        raise ValueError(f"opt_level={opt_level!r} must be one of: {', '.join(OPT_LEVELS)}.")
    if not isinstance(model, nn.Module):
        raise ValueError(f"model must be a torch.nn.Module, not {type(model).__name__}.")
    if isinstance(model, DistributedDataParallel):
        raise ValueError("Call initialize before DistributedDataParallel wraps the model.")
    if is_converted(model) or Engine.of(model) is not None:
        raise ValueError("This model is converted already: call initialize once, on the plain model.")
    engine = _engine(opt_level, use_te, _device_of(model), options)
    if optimizer is None:
        optimizer = torch.optim.AdamW(model.parameters())
    engine.check_optimizer(optimizer)
    engine.convert(model, _device_of(model))
    engine.settle()
    engine.attach(optimizer)
    if engine.histories is not None:
        histories = engine.histories
        optimizer.register_step_post_hook(lambda *_: histories.update())
    optimizer.all_reduce_grads = _all_reduce_grads  # type: ignore[attr-defined]
    _UnderDDP(engine, model)
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
    parsed = parse_options(get_level(OPT_LEVELS[opt_level]), options)
    return Engine(
        parsed.level,
        parsed.recipe,
        None,
        parsed.layers,
        parsed.backend,
        parsed.low_bit,
        torch.float32,
        parsed.attention,
    )


def _device_of(model: nn.Module) -> torch.device:
    param = next(model.parameters(), None)
    return torch.device("cpu") if param is None else param.device


def _all_reduce_grads(model: nn.Module, group: Any = None) -> None:
    """Average the gradients of ALL parameters of ``model`` over the processes, once, those in FP8 in FP8."""
    average_gradients(model.parameters(), group)


class _UnderDDP:
    """Averages FP8 gradients at the end of a backward pass of torch's DistributedDataParallel.

    DDP is told to leave the matrices alone: its buckets hold gradients of the parameters' dtype. It goes on
    averaging the vectors, which are FP32. ``no_sync()`` is respected.
    """

    def __init__(self, engine: Engine, model: nn.Module) -> None:
        self._engine = engine
        self._group: Any = None
        self._synced = False
        self._waiting = False
        self._params = [p for n, p in model.named_parameters() if p.dim() > 1]
        names = [n for n, p in model.named_parameters(remove_duplicate=False) if p.dim() > 1]
        ignored = set(getattr(model, "_ddp_params_and_buffers_to_ignore", ()))
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, list(ignored | set(names)))
        model.register_forward_pre_hook(self._before_forward)
        assert engine.gradients is not None
        engine.gradients.after = self._after_gradient

    def _before_forward(self, model: nn.Module, args: Any) -> None:
        ddp = DistributedDataParallel._get_active_ddp_module()
        self._group = None
        if ddp is None or ddp.module is not model:
            return
        if self._engine.low_bit.gradient_release:
            raise ValueError("gradient_release=True steps before gradients are averaged over processes. Leave it out.")
        if not self._synced:
            broadcast_weights(self._params, ddp.process_group)
            self._synced = True
        if ddp.require_backward_grad_sync and torch.is_grad_enabled():
            self._group = ddp.process_group

    def _after_gradient(self, param: Tensor) -> None:
        if self._group is not None and not self._waiting:
            self._waiting = True
            torch.autograd.Variable._execution_engine.queue_callback(self._average)  # type: ignore[attr-defined]

    def _average(self) -> None:
        self._waiting = False
        group, self._group = self._group, None
        average_gradients(self._params, group)

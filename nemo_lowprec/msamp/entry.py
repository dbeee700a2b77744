"""MS-AMP's call for a training loop without Lightning: the same engine, driven by the loop's own lines.

The module cannot have the function's name: importing it would hide ``msamp.initialize``.

``autocast``, ``GradScaler``, schedulers and ``DistributedDataParallel`` of torch work as they do on any model.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.optim import Optimizer

from nemo_lowprec.loops import prepare
from nemo_lowprec.msamp import OPT_LEVELS

__all__ = ["initialize"]


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

    Call ``initialize`` once the model is on its device, before ``DistributedDataParallel``. What is logged, and how
    gradients are averaged with and without DDP, is described at ``nemo_lowprec.prepare``.

    Args:
        model: any module. Layers with MS-AMP's attribute ``use_fp32_linear`` set are in ``skip``, too.
        optimizer: torch's Adam, AdamW, SGD or Muon, or this package's Lion or Muon, over the model's parameters; None
            for AdamW with torch's defaults.
        opt_level: ``O1``, ``O2`` or ``O3``.
        use_te: whether Transformer Engine runs the GEMMs; None for the fastest backend that can run.
        options: the FP8 and layer arguments of ``nemo_lowprec.msamp_o1``, ``stochastic_rounding``,
            ``gradient_release``.

    Returns:
        The same model and the same optimizer, which now has the method ``all_reduce_grads(model)``.

    Raises:
        ValueError, TypeError: as ``nemo_lowprec.prepare``; an unknown ``opt_level``, or ``use_te`` beside ``backend``.

    Source: MS-AMP's ``msamp.initialize``.
    """
    if not isinstance(opt_level, str) or opt_level not in OPT_LEVELS:
        raise ValueError(f"opt_level={opt_level!r} must be one of: {', '.join(OPT_LEVELS)}.")
    if use_te is not None:
        if "backend" in options:
            raise ValueError("use_te and backend choose the same thing: pass one of them.")
        on_gpu = isinstance(model, nn.Module) and any(p.is_cuda for p in model.parameters())
        options["backend"] = "te" if use_te else "torch" if on_gpu else "reference"
    modules = model.named_modules() if isinstance(model, nn.Module) else ()  # prepare refuses anything else
    kept = [name for name, module in modules if getattr(module, "use_fp32_linear", False)]
    if kept:
        skip = options.get("skip") or ()
        options["skip"] = [*((skip,) if isinstance(skip, str) else skip), *kept]
    return prepare(model, optimizer, OPT_LEVELS[opt_level], **options)

"""Hugging Face Accelerate at a level of the chart.

.. code-block:: python

   from accelerate import Accelerator
   from nemo_lowprec.accelerate import prepare

   accelerator = Accelerator(mixed_precision="bf16")
   model, optimizer, loader = prepare(accelerator, model, optimizer, loader, level="msamp_o2")

The rest of the loop is Accelerate's: ``accelerator.backward``, ``accumulate``, ``clip_grad_norm_``, ``save_state``.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.optim import Optimizer

from nemo_lowprec.chart import PrecisionLevel
from nemo_lowprec.compat.accelerate import is_prepared
from nemo_lowprec.loops.accelerated import check_options, choose, convert, without_own_fp8
from nemo_lowprec.loops.fp8_settings import level_of

__all__ = ["level_of", "prepare"]


def prepare(
    accelerator: Any,
    model: nn.Module,
    optimizer: Optimizer | None = None,
    *others: Any,
    level: str | PrecisionLevel | None = None,
    **options: Any,
) -> tuple[Any, ...]:
    """Prepare a model and its optimizer for training at a level, in place of ``accelerator.prepare``.

    The model is moved to the Accelerator's device and converted with its optimizer by ``nemo_lowprec.prepare``; then
    ``accelerator.prepare`` gets all objects. It works on one device and with DistributedDataParallel.

    Levels in FP16 train with ``mixed_precision="fp16"``, whose GradScaler scales the loss, on a CPU, too. Levels in
    BF16 train with ``"bf16"`` or ``"no"``. The MS-AMP levels train with any of these three, and in BF16 with ``"no"``.

    Args:
        accelerator: an ``accelerate.Accelerator``.
        model: any module that no Accelerator has prepared.
        optimizer: see ``nemo_lowprec.prepare``; None for AdamW with torch's defaults.
        others: further objects for ``accelerator.prepare``: data loaders, schedulers, other optimizers of the model.
        level: name of the level, or a row of your own; None with ``Accelerator(mixed_precision="fp8")``, whose recipe
            chooses the level (``level_of``).
        options: the arguments of the level, except the loss scale, which ``GradScalerKwargs`` sets.

    Returns:
        ``(model, optimizer, *others)``, prepared.

    Raises:
        ValueError: a level that does not agree with ``mixed_precision``, FSDP, DeepSpeed or another engine of
            Accelerate's, a ``comm_hook``, a model or optimizer that an Accelerator has prepared, a second model that
            would train; others as ``nemo_lowprec.prepare``.
        TypeError: an unknown option.
    """
    if isinstance(model, nn.Module) and is_prepared(model):
        raise ValueError(
            "The Accelerator has prepared this model already. Give the plain model and its optimizer to this prepare, "
            "which calls accelerator.prepare on both."
        )
    for other in others:
        if isinstance(other, nn.Module) and any(param.requires_grad for param in other.parameters()):
            raise ValueError(
                f"This prepare takes one model, and the {type(other).__name__} after the optimizer would train without "
                "the level. Call prepare for each model with its optimizer, or accelerator.prepare for this one."
            )
    row, arguments = choose(accelerator, level, options)
    check_options(accelerator, row, arguments)
    more = [other for other in others if isinstance(other, Optimizer)]
    first = convert(accelerator, model, [optimizer, *more], row, arguments)
    with without_own_fp8(accelerator):
        return tuple(accelerator.prepare(model, first, *others))

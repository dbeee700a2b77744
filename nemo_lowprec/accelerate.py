"""Hugging Face Accelerate at a level of the chart.

.. code-block:: python

   from accelerate import Accelerator
   from nemo_lowprec.accelerate import prepare

   accelerator = Accelerator(mixed_precision="bf16")
   model, optimizer, loader = prepare(accelerator, model, optimizer, loader, level="msamp_o2")

From there on the loop is Accelerate's: ``accelerator.backward``, ``accumulate``, ``clip_grad_norm_``, ``save_state``.
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
    BF16 train with ``"bf16"`` or ``"no"``. The MS-AMP levels take either, and ``"no"`` as BF16.

    Args:
        accelerator: an ``accelerate.Accelerator``.
        model: any module, which no Accelerator has prepared.
        optimizer: see ``nemo_lowprec.prepare``; None for AdamW with torch's defaults.
        others: what else ``accelerator.prepare`` takes: data loaders, schedulers, further optimizers of the model.
        level: name of the level, or a row of your own; None with ``Accelerator(mixed_precision="fp8")``, whose recipe
            chooses the level (``level_of``).
        options: the arguments of the level, but for the loss scale, which is ``GradScalerKwargs``'s.

    Returns:
        ``(model, optimizer, *others)``, prepared.

    Raises:
        ValueError: a level that does not agree with ``mixed_precision``, FSDP, DeepSpeed or another engine of
            Accelerate's, a ``comm_hook``, a model or optimizer that an Accelerator has prepared; others as
            ``nemo_lowprec.prepare``.
        TypeError: an unknown option.
    """
    if isinstance(model, nn.Module) and is_prepared(model):
        raise ValueError(
            "The Accelerator has prepared this model already. Give the plain model and its optimizer to this prepare, "
            "which calls accelerator.prepare on both."
        )
    row, arguments = choose(accelerator, level, options)
    check_options(accelerator, row, arguments)
    more = [other for other in others if isinstance(other, Optimizer)]
    first = convert(accelerator, model, [optimizer, *more], row, arguments)
    with without_own_fp8(accelerator):
        return tuple(accelerator.prepare(model, first, *others))

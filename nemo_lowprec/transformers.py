"""transformers' ``Trainer`` at a level of the chart.

.. code-block:: python

   from nemo_lowprec.transformers import LowPrecisionTrainer

   trainer = LowPrecisionTrainer(model, TrainingArguments("out", bf16=True), train_dataset=data, level="msamp_o2")
   trainer.train()
"""

from __future__ import annotations

from typing import Any

from torch.optim import Optimizer

from nemo_lowprec.chart import PrecisionLevel
from nemo_lowprec.compat.accelerate import forget_prepared
from nemo_lowprec.engine import Engine
from nemo_lowprec.extras import needs_extras
from nemo_lowprec.loops.accelerated import check_options, choose, convert, join, scale_loss
from nemo_lowprec.weights.widened import HALVES

with needs_extras("nemo_lowprec.transformers"):
    from transformers import Trainer

__all__ = ["LowPrecisionTrainer"]


class LowPrecisionTrainer(Trainer):
    """``Trainer`` that trains its model at a level, on one device and with DistributedDataParallel.

    The model is converted with the Trainer's optimizer when training starts, before a checkpoint's optimizer state is
    loaded. Checkpoints and ``save_model`` hold plain weights under the model's own names: master weights where the
    level has them. A run resumes bit for bit at its level. ``evaluate`` before ``train`` computes as the plain model.

    Levels in FP16 train with ``TrainingArguments(fp16=True)``, which scales the loss, on a CPU, too. Levels in BF16
    train with ``bf16=True`` or with neither. The MS-AMP levels train with any of these three, and in BF16 with neither.

    Args:
        args: positional arguments of ``Trainer``.
        level: name of the level, or a row of your own.
        level_options: the arguments of the level, except the loss scale.
        options: keywords of ``Trainer``.

    Raises:
        ValueError: a level that does not agree with ``fp16`` and ``bf16``, FSDP or DeepSpeed, ``fp16_full_eval`` or
            ``bf16_full_eval``, ``gradient_release`` with clipping or accumulation; when training starts, others as
            ``nemo_lowprec.prepare``.
        TypeError: an unknown option of the level.
    """

    def __init__(
        self,
        *args: Any,
        level: str | PrecisionLevel,
        level_options: dict[str, Any] | None = None,
        **options: Any,
    ) -> None:
        self._level, self._level_options = level, dict(level_options or {})
        self._engine: Engine | None = None
        super().__init__(*args, **options)

    def create_accelerator_and_postprocess(self) -> None:
        """Create the Accelerator, and compare it and the TrainingArguments with the level."""
        super().create_accelerator_and_postprocess()
        if self.args.n_gpu > 1:
            raise ValueError(
                f"transformers would copy the model to {self.args.n_gpu} GPUs by torch.nn.DataParallel, whose copies "
                "get no gradients in FP8. Start a process for each GPU (torchrun --nproc_per_node, accelerate launch), "
                "or set CUDA_VISIBLE_DEVICES to one GPU."
            )
        row, options = choose(self.accelerator, self._level, self._level_options)
        check_options(self.accelerator, row, options)
        for name in ("fp16_full_eval", "bf16_full_eval"):
            if getattr(self.args, name):
                raise ValueError(
                    f"{name}=True would cast weights that {row.name} has stored in its own formats. Leave it out: "
                    "evaluation computes at the level."
                )
        if options.get("gradient_release"):
            for name, least in {"max_grad_norm": 0, "gradient_accumulation_steps": 1}.items():
                if getattr(self.args, name) > least:
                    raise ValueError(
                        f"gradient_release=True has stepped each parameter before all gradients are there: "
                        f"{name} must be {least}. Leave one of them out."
                    )
        scale_loss(self.accelerator, row)
        self._row, self._row_options = row, options

    def create_optimizer(self, model: Any = None) -> Optimizer:
        """Create the optimizer, and convert the model with it where this Trainer has not converted the model yet."""
        plain: Any = self.model
        before = Engine.of(plain)
        if self.optimizer is None and before not in (None, self._engine) and before.model is plain:
            before.revert()  # the engine of an earlier Trainer; a copy's engine is that of the original
        optimizer = super().create_optimizer(model)
        if self._engine is None or Engine.of(plain) is not self._engine:
            forget_prepared(plain)  # by an evaluation before; else DistributedDataParallel would not wrap it
            convert(self.accelerator, plain, [optimizer], self._row, self._row_options)
            self._engine = Engine.of(plain)
        elif getattr(optimizer, "optimizer", optimizer) not in self._engine.optimizers:  # not the one that was prepared
            join(self.accelerator, self._engine, optimizer)
        return optimizer

    def _load_from_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        """Load a checkpoint; weights that a plain model has in half precision would round its master weights."""
        plain: Any = self.model
        if Engine.of(plain) is None:
            for param in plain.parameters():
                if param.requires_grad and param.dtype in HALVES:
                    param.data = param.data.float()
        super()._load_from_checkpoint(*args, **kwargs)

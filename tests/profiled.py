"""A small Llama that is profiled while it trains."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch

from nemo_lowprec.models import CausalLM
from nemo_lowprec.plugins import LEVELS
from nemo_lowprec.report import StepProfile, StepProfiler

__all__ = ["BLOCKS", "LINEARS", "profiled"]

BLOCKS = 2
_NAMES = ("q_proj", "k_proj", "v_proj", "o_proj"), ("gate_proj", "up_proj", "down_proj")
LINEARS = [
    f"model.model.layers.{block}.{parent}.{name}"
    for block in range(BLOCKS)
    for parent, names in zip(("self_attn", "mlp"), _NAMES, strict=True)
    for name in names
]


class Losses(pl.Callback):
    def __init__(self) -> None:
        self.found: list[torch.Tensor] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, index: int) -> None:
        self.found.append(outputs["loss"].detach())


def profiled(
    level: str,
    path: Path | None,
    accelerator: str,
    accumulate: int = 1,
    length: int = 32,
    validates: bool = False,
    **options: Any,
) -> tuple[list[float], StepProfile | None]:
    """The losses of a training of as many steps as a profile takes, and the profile; None without a ``path``.

    ``validates``: whether two batches are validated after each micro-batch.
    """
    torch.manual_seed(0)
    config = {"num_hidden_layers": BLOCKS}
    model = CausalLM("llama_tiny", config=config, vocab_size=128, init_seed=1, schedule_steps=100)
    losses = Losses()
    callbacks: list[pl.Callback] = [losses]
    if path is not None:
        callbacks.append(StepProfiler(path))
    steps = StepProfiler.steps()
    trainer = pl.Trainer(
        accelerator=accelerator, devices=1, max_steps=steps + 2, plugins=LEVELS[level](**options), callbacks=callbacks,
        logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        accumulate_grad_batches=accumulate, val_check_interval=1, limit_val_batches=2 * validates,
        num_sanity_val_steps=0,
    )  # fmt: skip
    tokens = torch.randint(128, (2 * accumulate * (steps + 2), length + 1), generator=torch.Generator().manual_seed(1))
    batches = [{"input_ids": rows[:, :-1], "labels": rows[:, 1:]} for rows in tokens.split(2)]
    loader = torch.utils.data.DataLoader(batches, batch_size=None)
    trainer.fit(model, loader, loader)
    profiler = next((one for one in trainer.callbacks if isinstance(one, StepProfiler)), None)
    return torch.stack(losses.found).tolist(), None if profiler is None else profiler.profile

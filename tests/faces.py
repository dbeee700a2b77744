"""Two tasks that every face of the package trains, and their losses under the Trainer.

A ViT reads scikit-learn's 8 x 8 digits; a Llama of two layers reads the bytes of Python's ``argparse``.
"""

from __future__ import annotations

import argparse
import functools
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM, ViTConfig, ViTForImageClassification

from tests.support import plugin

__all__ = ["FACE_LEVELS", "STEPS", "TASKS", "Task", "batches", "make_model", "make_optimizer", "trainer_losses"]

FACE_LEVELS = ("bf16_with_fp8_mixed", "msamp_o2")
TASKS = ("vit", "llama")
STEPS = 12
_BATCH = 16


def make_model(task: str) -> nn.Module:
    """The model of ``task``, with the same weights each time; it takes a batch as keywords and returns ``.loss``."""
    torch.manual_seed(0)
    if task == "vit":
        vit = ViTConfig(
            hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128, image_size=8,
            patch_size=2, num_channels=1, num_labels=10, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        )  # fmt: skip
        return ViTForImageClassification(vit)
    llama = LlamaConfig(
        hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, intermediate_size=128,
        vocab_size=256, max_position_embeddings=32,
    )  # fmt: skip
    return LlamaForCausalLM(llama)


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """AdamW over all parameters of ``model``."""
    return torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.01)


@functools.cache
def batches(task: str, steps: int = STEPS) -> list[dict[str, Tensor]]:
    """Batches of 16 images or 16 sequences of 32 tokens, keywords of the model's forward."""
    if task == "vit":
        digits = load_digits()
        images = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16
        target = torch.tensor(digits.target)
        parts = [slice(i * _BATCH, (i + 1) * _BATCH) for i in range(steps)]
        return [{"pixel_values": images[part], "labels": target[part]} for part in parts]
    text = torch.tensor(list(Path(argparse.__file__).read_bytes()[: steps * _BATCH * 32]), dtype=torch.int64)
    return [{"input_ids": ids, "labels": ids} for ids in text.view(steps, _BATCH, 32)]


class Task(pl.LightningModule):
    def __init__(self, task: str) -> None:
        super().__init__()
        self.model = make_model(task)
        self.losses: list[float] = []

    def training_step(self, batch: dict[str, Tensor]) -> Tensor:
        loss = self.model(**batch).loss
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return make_optimizer(self.model)


@functools.cache
def trainer_losses(task: str, level: str, accelerator: str = "cpu", **options: Any) -> list[float]:
    """The losses of ``STEPS`` steps of ``task`` under Lightning's Trainer, at ``level`` with ``options``."""
    module = Task(task)
    trainer = pl.Trainer(
        plugins=plugin(level, **options), max_steps=STEPS, accelerator=accelerator, devices=1, barebones=True
    )
    trainer.fit(module, DataLoader(batches(task), batch_size=None))
    return module.losses

"""Trains a classifier of digits with Lightning's Transformer Engine plugin."""

import argparse

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from lightning.pytorch.plugins import TransformerEnginePrecision
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from transformer_engine.common.recipe import DelayedScaling, Format

FP8_FORMAT = Format.HYBRID  # E4M3 forward, E5M2 backward
HISTORY = 16


class Digits(pl.LightningModule):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(64, width),
            nn.LayerNorm(width),
            nn.ReLU(),
            nn.Linear(width, width),
            nn.ReLU(),
            nn.Linear(width, 10),
        )
        self.losses = []

    def training_step(self, batch, _):
        x, y = batch
        loss = F.cross_entropy(self.net(x), y)
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


def main() -> list[float]:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=20)
    args = parser.parse_args()
    torch.manual_seed(0)
    digits = load_digits()
    data = TensorDataset(torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target))
    # FP8 in the linear layers
    recipe = DelayedScaling(
        fp8_format=FP8_FORMAT,
        amax_history_len=HISTORY,  # steps
        amax_compute_algo="max",
    )
    precision = TransformerEnginePrecision(weights_dtype=torch.bfloat16, recipe=recipe, replace_layers=True)
    trainer = pl.Trainer(
        accelerator="auto",
        max_steps=args.steps,
        plugins=[precision],
        barebones=True,
    )
    model = Digits(128)
    trainer.fit(model, DataLoader(data, batch_size=64))
    return model.losses


if __name__ == "__main__":
    losses = main()

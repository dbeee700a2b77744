"""A small classifier, its data and its Trainer: two processes train it on the CPU in about a second, or on GPUs."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn
from torch.utils.data import Dataset

from nemo_lowprec import CHART, LowPrecision
from nemo_lowprec.plugins import LEVELS

__all__ = ["Net", "Samples", "plugin", "trainer"]


def plugin(case: str, device: str = "cpu") -> LowPrecision:
    """A level, or ``LEVEL+fp16`` for one with FP16 weights, with a loss scale that gradients do not overflow.

    On ``device="cuda"`` the backend is the level's own choice.
    """
    name, _, half = case.partition("+")
    options: dict[str, Any] = {"half": half} if half else {}
    level = CHART[name].with_half(half) if half else CHART[name]
    if level.has_fp8:
        options["convert"] = ("inp", "mid")  # on a GPU "auto" leaves layers as small as these in half precision
        if device == "cpu":
            options["backend"] = "reference"
    if level.has_loss_scale:
        options |= {"initial_loss_scale": 256.0, "hysteresis": 1}
    return LEVELS[name](**options)


class Samples(Dataset):
    """32 random inputs [32] and classes below 32."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(7)
        self.x = torch.randn(32, 32, generator=generator)
        self.y = torch.randint(0, 32, (32,), generator=generator)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"x": self.x[index], "y": self.y[index]}


class Net(pl.LightningModule):
    """A classifier of 300,000 parameters with dropout, so that a resumed run needs the random states, too."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.inp, self.norm = nn.Linear(32, 512), nn.LayerNorm(512)
        self.mid, self.drop, self.head = nn.Linear(512, 512, bias=False), nn.Dropout(0.2), nn.Linear(512, 32)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.drop(F.gelu(self.mid(self.norm(self.inp(x))))))

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        return F.cross_entropy(self(batch["x"]).float(), batch["y"])

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(batch)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val/loss", self.loss(batch), batch_size=len(batch["y"]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def trainer(
    plugins: Any, callbacks: list[Callback], device: str = "cpu", devices: int = 2, **options: Any
) -> pl.Trainer:  # fmt: skip
    """A Trainer of two processes, ``devices`` on each machine; it writes nothing by itself."""
    return pl.Trainer(
        accelerator="gpu" if device == "cuda" else device, devices=devices, num_nodes=2 // devices,
        plugins=plugins, callbacks=callbacks, logger=False, use_distributed_sampler=False,
        enable_progress_bar=False, enable_model_summary=False, num_sanity_val_steps=0, max_epochs=-1, **options,
    )  # fmt: skip

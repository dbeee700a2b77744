"""Trains two levels where only the core dependencies are installed, and writes their checkpoints to this folder."""

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import nn
from torch.utils.data import DataLoader

import nemo_lowprec


class Lit(LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))

    def training_step(self, batch, index):
        return self.layers(batch).float().square().mean()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


for level in (nemo_lowprec.msamp_o2, nemo_lowprec.bf16_with_fp8_mixed):
    torch.manual_seed(0)
    lit, data = Lit(), torch.randn(32, 32)
    trainer = Trainer(plugins=level(), max_steps=3, accelerator="cpu", enable_progress_bar=False)
    trainer.fit(lit, DataLoader(data, batch_size=16))
    trainer.save_checkpoint(f"{level.__name__}.ckpt")
    model = nn.Linear(32, 32)
    model, optimizer = nemo_lowprec.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2), level=level.__name__)
    losses = []
    for _ in range(3):
        loss = model(data).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    print(level.__name__, trainer.global_step, losses[-1] < losses[0])

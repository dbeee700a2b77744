import gc
import weakref

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from benchmarks.measure import Watch
from nemo_lowprec.plugins import LEVELS


class Module(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64))

    def training_step(self, batch, index):
        return self.model(batch).float().pow(2).mean()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())


@pytest.mark.parametrize("level", ["fp16_amp", "bf16_with_fp8_mixed", "msamp_o3"])
def test_who_keeps_the_figures_of_a_training_does_not_keep_its_model(level):
    watch = Watch(1, every=2, warmup=2, settled=1)
    module = Module()
    trainer = pl.Trainer(
        accelerator="auto", devices=1, max_steps=watch.steps, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, callbacks=[watch], plugins=LEVELS[level](),
    )  # fmt: skip
    trainer.fit(module, DataLoader(torch.randn(64, 16, 64), batch_size=None))
    model = weakref.ref(module)
    del module, trainer
    gc.collect()
    assert len(watch.rounds) == 1
    assert model() is None

"""A small Llama with a layer that is spoiled on purpose, for tests of what names the layer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from torch import Tensor, nn

from nemo_lowprec.data import TextDataModule
from nemo_lowprec.models import CausalLM
from nemo_lowprec.weights import master_of
from tests.support import plugin, trainer

CONFIG = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 2}
CONFIG["num_key_value_heads"] = 1
DOWN, QUERY = "model.model.layers.1.mlp.down_proj", "model.model.layers.1.self_attn.q_proj"

Spoil = Callable[[nn.Module], Any]


class Spoils(Callback):
    """Spoils a layer once the model is as it trains."""

    def __init__(self, layer: str, spoil: Spoil) -> None:
        self.layer, self.spoil = layer, spoil

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.spoil(pl_module.get_submodule(self.layer))


def large_weights(layer: nn.Module) -> None:
    weights = [layer.weight, master_of(layer.weight)]
    with torch.no_grad():
        for weight in weights:
            if weight is not None:
                weight.mul_(1e4)


def outliers(layer: nn.Module) -> None:
    def one_channel(module: nn.Module, args: tuple[Tensor]) -> tuple[Tensor]:
        (values,) = args
        return (torch.cat([values[..., :1] * 1e4, values[..., 1:]], dim=-1),)

    layer.register_forward_pre_hook(one_channel)


def train(level: str, data_dir: Path, steps: int, *callbacks: Callback) -> None:
    """Train at ``level`` on the CPU."""
    seed_everything(3, verbose=False)
    data = TextDataModule(data_dir, seq_length=32, micro_batch_size=4, validation_samples=8)
    data.prepare_data = lambda: None  # type: ignore[method-assign]  # the data are there
    run = trainer(plugin(level), *callbacks, max_steps=steps, max_epochs=-1, limit_val_batches=0)
    run.fit(CausalLM("llama_tiny", config=CONFIG, schedule_steps=steps), datamodule=data)

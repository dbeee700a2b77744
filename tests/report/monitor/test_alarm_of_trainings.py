"""Trainings that were spoiled on purpose are warned of, with the spoiled layer first; others are not."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from torch import Tensor, nn

from nemo_lowprec.data import TextDataModule
from nemo_lowprec.models import CausalLM
from nemo_lowprec.report.monitor import PrecisionMonitor, read_run
from nemo_lowprec.weights import master_of
from tests.support import plugin, trainer

CONFIG = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 2}
CONFIG["num_key_value_heads"] = 1
DOWN, QUERY = "model.model.layers.1.mlp.down_proj", "model.model.layers.1.self_attn.q_proj"
LEVELS = ["bf16_with_fp8_mixed", "bf16_with_fp8_current_scaling_mixed", "te_fp8", "msamp_o2", "msamp_o3"]


class Spoils(Callback):
    """Does something to a layer once the model is as it trains."""

    def __init__(self, layer: str, spoil: Callable[[nn.Module], Any]) -> None:
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


def said_of(level: str, data_dir: Path, folder: Path, *callbacks: Callback, steps: int = 24) -> list[str]:
    """What a monitored training warns of."""
    seed_everything(3, verbose=False)
    data = TextDataModule(data_dir, seq_length=32, micro_batch_size=4, validation_samples=8)
    data.prepare_data = lambda: None  # type: ignore[method-assign]  # the data are there
    options = {"max_steps": steps, "max_epochs": -1, "limit_val_batches": 0}
    run = trainer(plugin(level), *callbacks, PrecisionMonitor(2, folder), **options)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        run.fit(CausalLM("llama_tiny", config=CONFIG, schedule_steps=steps), datamodule=data)
    return [text for one in found if "since step" in (text := str(one.message))]


@pytest.mark.parametrize("layer", [DOWN, QUERY])
@pytest.mark.parametrize(("spoil", "operand"), [(large_weights, "weight"), (outliers, "input")])
@pytest.mark.parametrize("level", LEVELS)
def test_the_spoiled_layer_is_warned_of_first(
    level: str, spoil: Callable[[nn.Module], Any], operand: str, layer: str, data_dir: Path, tmp_path: Path
) -> None:
    (said,) = said_of(level, data_dir, tmp_path, Spoils(layer, spoil))
    assert said.startswith(f"{layer}: its {operand} has ") and f'skip=["{layer}"])' in said
    assert (layer, operand) in {(found["layer"], found["operand"]) for found in read_run(tmp_path).warnings}


@pytest.mark.parametrize("level", [*LEVELS, "bf16_mixed", "bf16_with_fp8_subchannel_scaling_mixed"])
def test_a_training_as_it_should_be_is_not_warned_of(level: str, data_dir: Path, tmp_path: Path) -> None:
    assert said_of(level, data_dir, tmp_path, steps=30) == []
    run = read_run(tmp_path)
    assert run.warnings == [] and run.steps == list(range(2, 31, 2))

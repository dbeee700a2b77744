"""Trainings that were spoiled on purpose: their report names the layer first."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from torch import Tensor, nn

from benchmarks.browser import opened
from nemo_lowprec import bf16_with_fp8_mixed
from nemo_lowprec.data import TextDataModule
from nemo_lowprec.models import CausalLM
from nemo_lowprec.report.monitor.callback import PrecisionMonitor
from nemo_lowprec.report.monitor.runs import read_run
from nemo_lowprec.report.page.run_page import write_report
from nemo_lowprec.report.spoiled import crossings
from nemo_lowprec.weights import master_of

CONFIG = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 2}
CONFIG["num_key_value_heads"] = 1
LAYER = "model.model.layers.1.mlp.down_proj"


class Spoils(Callback):
    """Does something to a layer once the model is as it trains."""

    def __init__(self, spoil: Callable[[nn.Module], Any]) -> None:
        self.spoil = spoil

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.spoil(pl_module.get_submodule(LAYER))


def large_weights(layer: nn.Module) -> None:
    with torch.no_grad():
        for weight in (layer.weight, master_of(layer.weight)):
            weight.mul_(1e4)


def outliers(layer: nn.Module) -> None:
    def one_channel(module: nn.Module, args: tuple[Tensor]) -> tuple[Tensor]:
        (values,) = args
        return (torch.cat([values[..., :1] * 1e4, values[..., 1:]], dim=-1),)

    layer.register_forward_pre_hook(one_channel)


@pytest.mark.parametrize(("spoil", "operand"), [(large_weights, "weight"), (outliers, "input")])
def test_the_report_names_the_spoiled_layer_first(
    chromium: Any, spoil: Callable[[nn.Module], Any], operand: str, data_dir: Path, tmp_path: Path
) -> None:
    seed_everything(3, verbose=False)
    trainer = Trainer(
        accelerator="cpu",
        plugins=bf16_with_fp8_mixed(backend="reference"),
        max_steps=14,
        limit_val_batches=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[Spoils(spoil), PrecisionMonitor(every_n_steps=2, folder=tmp_path)],
    )
    data = TextDataModule(data_dir, seq_length=32, micro_batch_size=4, validation_samples=8)
    data.prepare_data = lambda: None  # type: ignore[method-assign]  # the data are there
    trainer.fit(CausalLM("llama_tiny", config=CONFIG, schedule_steps=14), datamodule=data)
    first = crossings(read_run(tmp_path))[0]
    assert (first.layer, first.operand) == (LAYER, operand)
    with opened(chromium, write_report(tmp_path)) as found:
        assert found.said == []
        assert found.page.locator("#verdict a.layer").first.inner_text() == LAYER
        assert found.page.locator("#history").get_attribute("data-layer") == LAYER

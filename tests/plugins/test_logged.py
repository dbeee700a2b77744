"""What the loggers are told of a level: its name, the loss scale, skipped steps, the gradient norm."""

import csv
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import yaml
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.utils.data import DataLoader

import nemo_lowprec
from nemo_lowprec.chart import CHART

SCALE = 16.0
LEVELS = [name for name in CHART if "mxfp8" not in name and "nvfp4" not in name]


class Net(pl.LightningModule):
    def __init__(self, width: int = 32, infinite_at: int | None = None, save: bool = True) -> None:
        super().__init__()
        if save:
            self.save_hyperparameters()
        self.net = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width))
        self.infinite_at, self.norms = infinite_at, []

    def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
        loss = self.net(batch).square().mean()
        self.log("loss", loss)
        return loss * (torch.inf if index == self.infinite_at else 1.0)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        grads = [p.grad.float().flatten() for p in self.parameters() if p.grad is not None]
        self.norms += [float(torch.cat(grads).norm())] if grads else []

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def data() -> DataLoader:
    return DataLoader(torch.randn(6, 16, 32, generator=torch.Generator().manual_seed(0)), batch_size=None)


def fit(level: str, folder: Path, module: Net, every: int = 1, **options: Any) -> pl.Trainer:
    arguments = options.pop("arguments", {}) | ({"backend": "reference"} if CHART[level].has_fp8 else {})
    if CHART[level].has_loss_scale or arguments.get("half") == "fp16":
        arguments["initial_loss_scale"] = SCALE
    trainer = pl.Trainer(
        plugins=getattr(nemo_lowprec, level)(**arguments), accelerator="cpu", max_epochs=1,
        logger=CSVLogger(folder, name="", version=""), enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, log_every_n_steps=every, **options,
    )  # fmt: skip
    trainer.fit(module, data())
    return trainer


def rows(folder: Path) -> list[dict[str, str]]:
    with open(folder / "metrics.csv") as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize("clip", [None, 0.01])
@pytest.mark.parametrize("level", LEVELS)
def test_each_level_logs_its_name_and_its_steps(level: str, clip: float | None, tmp_path: Path) -> None:
    module = Net()
    fit(level, tmp_path, module, gradient_clip_val=clip)
    hparams = yaml.safe_load((tmp_path / "hparams.yaml").read_text())
    assert hparams["precision_level"] == level and hparams["width"] == 32
    assert "precision_level" not in module.hparams_initial and "precision_level" not in module.hparams
    found = rows(tmp_path)
    assert [row["step"] for row in found] == [str(step) for step in range(6)]  # in the rows of the loss
    assert all(row["loss"] for row in found) and [float(row["skipped_steps"]) for row in found] == [0.0] * 6
    assert [float(row["grad_norm"]) for row in found] == pytest.approx(module.norms, rel=1e-4)
    assert [row.get("loss_scale") for row in found] == [str(SCALE) if CHART[level].has_loss_scale else None] * 6


@pytest.mark.parametrize(("level", "half"), [("fp16_mixed", {}), ("bf16_mixed", {}), ("msamp_o2", {"half": "fp16"})])
def test_skipped_steps_are_counted(level: str, half: dict[str, str], tmp_path: Path) -> None:
    trainer = fit(level, tmp_path, Net(infinite_at=2), arguments=half)
    found = rows(tmp_path)
    assert [float(row["skipped_steps"]) for row in found] == [0.0, 0.0, 1.0, 1.0, 1.0, 1.0]
    assert not torch.isfinite(torch.tensor(float(found[2]["grad_norm"])))
    assert trainer.precision_plugin.log.skipped_steps == trainer.precision_plugin.state_dict()["skipped_steps"] == 1


def test_the_count_goes_on_after_a_resume(tmp_path: Path) -> None:
    trainer = fit("bf16_mixed", tmp_path / "first", Net(infinite_at=2))
    trainer.save_checkpoint(tmp_path / "saved.ckpt")
    plugin = nemo_lowprec.bf16_mixed()
    plugin.load_state_dict(torch.load(tmp_path / "saved.ckpt", weights_only=False)[plugin.__class__.__qualname__])
    assert plugin.log.skipped_steps == 1


def test_only_every_n_th_step_is_written_and_a_module_without_hyperparameters_has_none(tmp_path: Path) -> None:
    module = Net(save=False)
    fit("msamp_o2", tmp_path, module, every=3, arguments={"half": "fp16"})
    assert [row["step"] for row in rows(tmp_path)] == ["2", "5"]
    hparams = yaml.safe_load((tmp_path / "hparams.yaml").read_text())
    assert hparams == {
        "precision_level": "msamp_o2",
        "precision_options": "half='fp16', backend='reference', initial_loss_scale=16.0",
    }
    assert not module.hparams_initial and not module._log_hyperparams


def test_what_is_not_known_is_not_written(tmp_path: Path) -> None:
    fit("msamp_o2", tmp_path, Net(), arguments={"gradient_release": True})
    assert "grad_norm" not in rows(tmp_path)[0] and rows(tmp_path)[0]["skipped_steps"] == "0.0"


def test_autolog_of_hyperparameters_can_be_turned_off(tmp_path: Path) -> None:
    fit("bf16_mixed", tmp_path, Net(), enable_autolog_hparams=False)
    assert rows(tmp_path) and not (tmp_path / "hparams.yaml").exists()


class TwoOptimizers(Net):
    automatic_optimization = False

    def training_step(self, batch: torch.Tensor, index: int) -> None:
        for optimizer in self.optimizers():
            optimizer.zero_grad()
            self.manual_backward(self.net(batch).square().mean())
            self.clip_gradients(optimizer, gradient_clip_val=0.5)
            optimizer.step()

    def on_before_optimizer_step(self, optimizer: Any) -> None: ...

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        return [torch.optim.AdamW(self.net[i].parameters(), lr=1e-3) for i in (0, 2)]


def test_each_optimizer_has_a_norm_of_its_own(tmp_path: Path) -> None:
    fit("bf16_with_fp8_mixed", tmp_path, TwoOptimizers())
    (first, second) = (float(rows(tmp_path)[0][f"grad_norm/{i}"]) for i in range(2))
    assert 0 < first != second > 0

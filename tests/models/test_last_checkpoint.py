"""``last.ckpt`` is the last one, also while the loss rises and no checkpoint is among the best."""

from pathlib import Path

import pytest
import torch
from lightning.pytorch import LightningDataModule
from lightning.pytorch.callbacks import ModelCheckpoint

from nemo_lowprec.checkpoint.sharded_folder import META
from nemo_lowprec.cli import main
from nemo_lowprec.train import pretrain
from tests.cli.test_cli import tiny  # noqa: F401
from tests.processes import on_processes
from tests.support import Net, loader, plugin, trainer


class Rising(Net):
    """Whose validation loss rises with every step."""

    def validation_step(self, batch, batch_idx):
        self.log("val/loss", float(self.global_step), sync_dist=True)


class Data(LightningDataModule):
    def train_dataloader(self):
        return loader(count=96)

    def val_dataloader(self):
        return loader(count=8)


def step_of(path):
    saved = torch.load(path / META if path.is_dir() else path, weights_only=True)
    return saved["global_step"]


class Watches(ModelCheckpoint):
    """Notes what lies in ``last.ckpt`` when the training goes on after a validation."""

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        path = Path(self.dirpath) / "last.ckpt"
        if path.exists():
            self.__dict__.setdefault("seen", {})[trainer.global_step] = step_of(path)


def run(folder, level="bf16_mixed", ckpt=None, max_steps=8, saving=None, **options):
    saving = {"monitor": "val/loss", "filename": "best", "save_last": True} | (saving or {})
    saves = Watches(folder, **saving)
    how = {"val_check_interval": 3, "check_val_every_n_epoch": None, "max_epochs": -1} | options
    fit = trainer(plugin(level), saves, max_steps=max_steps, **how)
    pretrain(Rising(), Data(), fit, ckpt_path=ckpt)
    return saves


@pytest.mark.parametrize("saving", [{}, {"save_last": "link"}, {"save_on_train_epoch_end": True}, {"save_top_k": 0}])
@pytest.mark.parametrize("level", ["bf16_mixed", "msamp_o2"])
def test_every_validation_and_the_end_are_saved(tmp_path, level, saving):
    saves = run(tmp_path, level, saving=saving)
    assert step_of(tmp_path / "last.ckpt") == 8
    if not saving:
        assert step_of(tmp_path / "best.ckpt") == 3
        assert saves.seen == {3: 3, 4: 3, 5: 3, 6: 6, 7: 6}
    assert not list(tmp_path.glob("last-v*"))


def test_the_best_is_still_saved_at_the_end_of_an_epoch(tmp_path):
    """Whatever was saved as the last one at the same step."""

    class Falling(Rising):
        def validation_step(self, batch, batch_idx):
            self.log("val/loss", -float(self.global_step))

    saves = ModelCheckpoint(tmp_path, "best", "val/loss", save_last=True, save_on_train_epoch_end=True)
    pretrain(Falling(), Data(), trainer(plugin("bf16_mixed"), saves, max_epochs=2))
    assert step_of(tmp_path / "best.ckpt") == step_of(tmp_path / "last.ckpt") == 48


def test_a_run_that_is_not_validated_is_saved_at_its_end(tmp_path):
    run(tmp_path, limit_val_batches=0, saving={"monitor": None, "every_n_train_steps": 5})
    assert step_of(tmp_path / "last.ckpt") == 8


def test_a_run_goes_on_from_it(tmp_path):
    run(tmp_path)
    run(tmp_path / "on", ckpt=str(tmp_path / "last.ckpt"), max_steps=10)
    assert step_of(tmp_path / "on" / "last.ckpt") == 10


def test_nobody_asks_for_a_last_one(tmp_path):
    run(tmp_path, saving={"save_last": None})
    assert [path.name for path in tmp_path.iterdir()] == ["best.ckpt"]


def on_two(rank, place):
    for strategy in ("lowprec_sharded", "ddp"):
        run(place / strategy, "msamp_o2", devices=2, strategy=strategy, max_steps=5)


def test_on_several_processes(tmp_path):
    on_processes(2, tmp_path, on_two, tmp_path)
    for strategy in ("lowprec_sharded", "ddp"):
        assert step_of(tmp_path / strategy / "last.ckpt") == 5 and step_of(tmp_path / strategy / "best.ckpt") == 3


def test_the_command_keeps_it(tiny, tmp_path):  # noqa: F811
    # No step is larger than a half copy's rounding: the first loss stays the best.
    options = ["model.lr=1e-12", "model.min_lr=0", "output_dir=out", "logger=csv"]
    options += ["trainer.max_steps=7", "trainer.val_check_interval=1"]
    assert main(["pretrain", *tiny, "precision=bf16_mixed", *options]) == 0
    best, last = (step_of(tmp_path / "out" / "checkpoints" / f"{name}.ckpt") for name in ("best", "last"))
    assert last == 7 and best < 7

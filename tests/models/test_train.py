"""``train.pretrain``: what every face ends in."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

from nemo_lowprec import bf16_with_fp8_mixed
from nemo_lowprec.data import TextDataModule
from nemo_lowprec.models import CausalLM
from nemo_lowprec.train import check_ckpt_path, pretrain

CONFIG = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
CONFIG["num_key_value_heads"] = 1


class Prepared(TextDataModule):
    """Data that exist already: nothing to prepare."""

    def prepare_data(self) -> None:
        pass


def parts(data_dir: Path, folder: Path, **options: Any) -> dict[str, Any]:
    defaults = {
        "accelerator": "cpu",
        "plugins": bf16_with_fp8_mixed(backend="reference"),
        "max_steps": 4,
        "num_sanity_val_steps": -1,
        "val_check_interval": 100,
        "check_val_every_n_epoch": None,
        "logger": False,
        "log_every_n_steps": 1,
        "callbacks": [ModelCheckpoint(folder, filename="best", monitor="val/loss", save_last=True)],
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "default_root_dir": folder,
    }
    return {
        "model": CausalLM("llama_tiny", config=CONFIG, lr=1e-2, schedule_steps=8),
        "data": Prepared(data_dir, seq_length=32, micro_batch_size=4, validation_samples=8),
        "trainer": Trainer(**{**defaults, **options}),
    }


def test_last_step_is_validated_and_saved(
    data_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    made = parts(data_dir, tmp_path)
    callbacks = list(made["trainer"].callbacks)
    result = pretrain(**made)
    assert made["trainer"].callbacks == callbacks
    assert (result.level, result.steps) == ("bf16_with_fp8_mixed", 4)
    assert result.val_loss < result.val_loss_before
    (found,) = made["trainer"].validate(made["model"], made["data"], verbose=False)
    assert result.val_loss == pytest.approx(found["val/loss"])
    assert result.tokens_per_sec > 0
    assert result.checkpoint == "best.ckpt" and (tmp_path / "last.ckpt").exists()
    printed = capsys.readouterr().out
    for text in ("bf16_with_fp8_mixed", f"{result.val_loss_before:.4f}", f"{result.val_loss:.4f}", "best.ckpt"):
        assert text in printed


def test_resumed_run_ends_as_one_that_was_not_interrupted(data_dir: Path, tmp_path: Path) -> None:
    whole = parts(data_dir, tmp_path / "whole", max_steps=6)
    pretrain(**whole)
    first = parts(data_dir, tmp_path / "first", max_steps=3)
    pretrain(**first)
    second = parts(data_dir, tmp_path / "second", max_steps=6)
    result = pretrain(**second, ckpt_path=str(tmp_path / "first" / "last.ckpt"))
    assert result.steps == 6 and result.val_loss_before is None
    expected = whole["model"].state_dict()
    found = second["model"].state_dict()
    assert list(found) == list(expected)
    for name in expected:
        assert torch.equal(found[name], expected[name]), name


@pytest.mark.parametrize("name", ["model", "data", "trainer"])
def test_config_that_was_not_built_is_refused(name: str, data_dir: Path, tmp_path: Path) -> None:
    fiddle = pytest.importorskip("fiddle")
    made = parts(data_dir, tmp_path)
    made[name] = fiddle.Config(type(made[name]))
    with pytest.raises(TypeError, match=f"{name} is a nemo_run Config.*build it"):
        pretrain(**made)


def test_trainer_of_pytorch_lightning_is_refused(data_dir: Path, tmp_path: Path) -> None:
    other = pytest.importorskip("pytorch_lightning")
    made = parts(data_dir, tmp_path)
    made["trainer"] = other.Trainer(logger=False, enable_checkpointing=False, accelerator="cpu")
    with pytest.raises(TypeError, match=r"trainer is a class of pytorch_lightning.*lightning\.pytorch"):
        pretrain(**made)


def test_other_type_is_named(data_dir: Path, tmp_path: Path) -> None:
    made = parts(data_dir, tmp_path)
    made["model"] = torch.nn.Linear(2, 2)
    with pytest.raises(TypeError, match=r"model must be a LightningModule of lightning\.pytorch, not Linear"):
        pretrain(**made)


def test_checkpoint_that_is_not_there_is_named_before_training(data_dir: Path, tmp_path: Path) -> None:
    made = parts(data_dir, tmp_path)
    model = copy.deepcopy(made["model"])
    with pytest.raises(ValueError, match=r"nowhere\.ckpt"):
        pretrain(**made, ckpt_path=str(tmp_path / "nowhere.ckpt"))
    assert made["model"].model is model.model is None


def test_a_half_written_checkpoint_is_refused_before_anything_runs(tmp_path):
    whole = tmp_path / "whole.ckpt"
    torch.save({"state_dict": {"weight": torch.zeros(1000)}}, whole)
    cut = tmp_path / "cut.ckpt"
    cut.write_bytes(whole.read_bytes()[:2000])
    with pytest.raises(ValueError, match="is no complete checkpoint"):
        check_ckpt_path(cut)
    check_ckpt_path(whole)

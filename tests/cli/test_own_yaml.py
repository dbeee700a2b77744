"""A user's own choices, in a folder of the user's own; and options of the Trainer without a plus."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml

from nemo_lowprec.cli import main
from tests.cli.test_cli import ROOT, TINY
from tests.processes import of_a_shell


@pytest.fixture
def small(data_dir: Path) -> list[str]:
    prefixes = [f"data.{split}_prefix={data_dir / split}" for split in ("train", "validation")]
    return [*TINY, *prefixes, "trainer.max_steps=1", "logger=csv"]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    files = {
        "precision/mine.yaml": "defaults:\n  - msamp_o2\nhalf: fp16\nbackend: reference\n",
        "precision/team/ours.yaml": "_target_: nemo_lowprec.fp16_mixed\nloss_scale: 8.0\n",
        "experiment/short.yaml": "# @package _global_\ndefaults:\n  - override /precision: msamp_o3\n"
        "trainer:\n  max_steps: 1\n",
        "model/narrow.yaml": "defaults:\n  - llama_tiny\nlr: 1e-5\nmin_lr: 0.0\n",
    }
    for name, text in files.items():
        path = tmp_path / "mine" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


def checkpoint(folder: Path, name: str) -> dict:
    (path,) = folder.glob(f"outputs/*/*_{name}/checkpoints/last.ckpt")
    return torch.load(path, weights_only=False)


@pytest.mark.parametrize("way", [["--config-dir", "mine"], ["--config-dir=mine"], ["hydra.searchpath=[mine]"]])
def test_a_level_of_one_s_own(way: list[str], folder: Path, small: list[str], capsys: pytest.CaptureFixture) -> None:
    overrides = ["precision=mine", "model=narrow", "precision.loss_scale=4.0"]
    assert main(["pretrain", *way, *small, *overrides]) == 0
    printed = capsys.readouterr().out
    assert "msamp_o2(" in printed and "half='fp16'" in printed and "loss_scale=4.0" in printed
    assert checkpoint(folder, "mine")["hyper_parameters"]["lr"] == 1e-5


def test_searchpath_with_a_scheme_and_a_choice_in_a_folder(folder: Path, small: list[str]) -> None:
    way = f"hydra.searchpath=[file://{folder / 'mine'}]"
    assert main(["pretrain", way, *small, "precision=team/ours", "hydra.run.dir=out"]) == 0
    saved = torch.load("out/checkpoints/last.ckpt", weights_only=False)
    assert saved["global_step"] == 1


def test_an_experiment_of_one_s_own_may_choose_the_level(folder: Path, small: list[str]) -> None:
    """An argument is one of the level that the experiment chooses, and not of the default level."""
    arguments = ["experiment=short", "precision.half=fp16", "precision.backend=reference"]
    assert main(["pretrain", "--config-dir", "mine", *small, *arguments]) == 0
    assert checkpoint(folder, "msamp_o3")["global_step"] == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--config-dir", "mine", "precision=yours"], "Unknown precision 'yours'. Choose one of: fp16_amp,"),
        (["--config-dir", "mine", "precision=yours"], "bf16_with_nvfp4_mixed, mine, team/ours."),
        (["precision=mine"], "Unknown precision level 'mine'"),
        (["--config-dir", "mine", "model=narow"], "megatron_llama_tiny, narrow."),
        (["--config-dir", "mine", "precision=mine", "precision.hlf=fp16"], "msamp_o2 has no argument 'hlf'"),
        (["--config-dir", "nowhere", "precision=mine"], "nowhere is no folder: --config-dir"),
        (["hydra.searchpath=[file://nowhere]", "precision=mine"], "nowhere is no folder"),
    ],
)
def test_a_choice_that_is_not_there(
    arguments: list[str], message: str, folder: Path, capsys: pytest.CaptureFixture
) -> None:
    assert main(["pretrain", *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error and "Traceback" not in error


@pytest.mark.parametrize("plus", ["", "+", "++"])
def test_options_of_the_trainer_and_fields_of_the_architecture_take_any_plus(
    plus: str, folder: Path, small: list[str]
) -> None:
    options = [f"{plus}trainer.limit_val_batches=1", f"{plus}model.config.hidden_size=48", "hydra.run.dir=out"]
    assert main(["pretrain", *small, *options]) == 0
    config = yaml.safe_load(Path("out/.hydra/config.yaml").read_text())
    assert config["trainer"]["limit_val_batches"] == 1 and config["model"]["config"]["hidden_size"] == 48


def test_each_run_of_a_sweep_over_several_processes_starts_its_own(folder: Path, small: list[str]) -> None:
    """Lightning starts the other processes of a run with a command line, which must be of that run only."""
    sweep = ["-m", "precision=bf16_mixed,mine", "strategy=lowprec_ddp", "gpus=2", "hydra.sweep.dir=out"]
    command = [sys.executable, "-m", "nemo_lowprec.cli", "pretrain", "--config-dir", "mine", *small, *sweep]
    env = {**of_a_shell(), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    table = done.stdout.rpartition("Runs of this sweep")[2]
    for name in ("0_bf16_mixed", "1_mine"):
        assert torch.load(folder / "out" / name / "checkpoints" / "last.ckpt", weights_only=False)["global_step"] == 1
        assert name in table
    assert {path.name for path in folder.iterdir()} == {"mine", "out"}

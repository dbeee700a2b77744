"""The folder of a recipe's run names the level that it is trained at."""

import functools
import subprocess
import sys
from pathlib import Path
from typing import Any

import fiddle as fdl
import nemo_run as run
import pytest
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger

from nemo_lowprec import recipes
from nemo_lowprec.recipes import fp16_mixed, msamp_o2, tiny
from nemo_lowprec.recipes.level_folder import CheckedTrainer
from tests.processes import of_a_shell


def trainer_of(recipe: Any) -> Any:
    recipe.trainer.accelerator = "cpu"
    return fdl.build(recipe.trainer)


def test_everything_is_written_below_the_level() -> None:
    recipe = tiny.pretrain_recipe(dir="runs", name="x")
    recipe.trainer.plugins = fp16_mixed()
    trainer = trainer_of(recipe)
    assert trainer.default_root_dir.endswith("runs/x/fp16_mixed")
    assert trainer.checkpoint_callback.dirpath == str(Path("runs/x/fp16_mixed/checkpoints").absolute())
    folders = [Path(logger.log_dir) for logger in trainer.loggers]
    assert folders == [Path("runs/x/fp16_mixed/tensorboard"), Path("runs/x/fp16_mixed/csv")]


@pytest.mark.parametrize(
    ("plugins", "precision", "name"),
    [
        ([msamp_o2(half="fp16")], None, "msamp_o2"),
        (None, "bf16-mixed", "bf16-mixed"),
        (None, None, "32-true"),
        ([], 64, "64"),
    ],
)
def test_level_may_come_in_a_list_and_a_precision_of_lightning_s_counts(
    plugins: Any, precision: Any, name: str
) -> None:
    recipe = tiny.pretrain_recipe()
    recipe.trainer.plugins, recipe.trainer.precision = plugins, precision
    assert Path(trainer_of(recipe).default_root_dir).name == name


def test_what_the_user_sets_is_kept(tmp_path: Path) -> None:
    recipe = tiny.pretrain_recipe(dir=str(tmp_path), name="x")
    recipe.trainer.callbacks[0].dirpath = str(tmp_path / "mine")
    recipe.trainer.callbacks[0].save_top_k = 3
    recipe.trainer.callbacks.append(run.Config(EarlyStopping, monitor="val/loss"))
    recipe.trainer.logger = run.Config(CSVLogger, save_dir=str(tmp_path / "logs"))
    trainer = trainer_of(recipe)
    assert trainer.checkpoint_callback.dirpath == str(tmp_path / "mine") and trainer.checkpoint_callback.save_top_k == 3
    assert trainer.early_stopping_callback is not None and trainer.logger.save_dir == str(tmp_path / "logs")
    recipe.trainer.callbacks, recipe.trainer.logger = [], False
    trainer = trainer_of(recipe)
    assert trainer.loggers == [] and trainer.checkpoint_callback.dirpath is None
    recipe.trainer.logger = run.Partial(CSVLogger, name="one", version="")
    assert trainer_of(recipe).logger.log_dir == f"{tmp_path}/x/bf16_with_fp8_mixed/one/"


def test_trainer_without_a_recipe_is_lightning_s(tmp_path: Path) -> None:
    trainer = CheckedTrainer(
        default_root_dir=tmp_path,
        accelerator="cpu",
        logger=False,
        callbacks=functools.partial(ModelCheckpoint, filename="best"),
    )
    assert trainer.checkpoint_callback.dirpath == str(tmp_path / "32-true" / "checkpoints")
    with pytest.raises(ValueError, match="max_steps='many' must be an integer"):
        CheckedTrainer(max_steps="many")
    with pytest.raises(ValueError, match="default_root_dir=3 must be a path"):
        CheckedTrainer(default_root_dir=3)
    with pytest.raises(TypeError, match="max_step"):
        CheckedTrainer(max_step=3)


@pytest.mark.slow
def test_two_processes_start_and_the_second_run_goes_on(data_dir: Path, tmp_path: Path) -> None:
    line = [
        "run",
        "--yes",
        "--factory",
        "tiny(num_gpus_per_node=2)",
        "trainer.plugins=fp16_mixed",
        "trainer.strategy=lowprec_ddp",
        "trainer.accelerator=cpu",
        "trainer.enable_progress_bar=False",
        "model.config={'hidden_size':32,'intermediate_size':64,'num_hidden_layers':1}",
        f"data.train_prefix={data_dir / 'train'}",
        f"data.validation_prefix={data_dir / 'validation'}",
        "data.max_bytes=None",
        "data.seq_length=32",
        "data.micro_batch_size=2",
        "data.validation_samples=8",
    ]
    environment = of_a_shell() | {"PYTHONPATH": str(Path(recipes.__file__).parents[2])}
    for more in (["trainer.max_steps=1"], ["trainer.max_steps=3", "ckpt_path=last"]):
        command = [sys.executable, "-m", "nemo_lowprec.cli", *line, *more]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        assert done.stdout.count("model = CausalLM") == 1 and "Dry run" not in done.stdout
    assert "last.ckpt" in done.stdout + done.stderr
    assert "outputs/tiny/fp16_mixed/checkpoints/" in done.stdout
    assert {path.name for path in tmp_path.joinpath("outputs/tiny/fp16_mixed").iterdir()} >= {"checkpoints", "csv"}

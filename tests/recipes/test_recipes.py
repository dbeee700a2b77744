"""The pretrain recipes, run for real."""

import os
import sys
from pathlib import Path
from typing import Any

import fiddle as fdl
import nemo_run as run
import pytest
import torch
from nemo_run.core.serialization.zlib_json import ZlibJSONSerializer

from nemo_lowprec import recipes
from nemo_lowprec.cli import main
from nemo_lowprec.models import PRESETS, CausalLM
from nemo_lowprec.recipes import bf16_mixed, fp16_mixed, llama3_8b, llama32_1b, tiny

RECIPES = {"tiny": tiny, "llama32_1b": llama32_1b, "llama3_8b": llama3_8b}
CONFIG = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
CONFIG["num_key_value_heads"] = 1


def small(data_dir: Path, folder: Path) -> Any:
    """The tiny recipe, shrunk to a second."""
    recipe = tiny.pretrain_recipe(dir=str(folder), name="run", max_steps=2)
    recipe.model.config = CONFIG
    # Existing .bin/.idx files: the recipe's own data come from the standard library.
    recipe.data = run.Config(
        type(fdl.build(recipe.data)),
        train_prefix=str(data_dir / "train"),
        validation_prefix=str(data_dir / "validation"),
        seq_length=32,
        micro_batch_size=4,
        validation_samples=8,
    )
    recipe.trainer.accelerator = "cpu"
    recipe.trainer.enable_progress_bar = False
    return recipe


@pytest.mark.parametrize("name", RECIPES)
def test_recipe_builds_and_survives_its_journey_to_the_executor(name: str, tmp_path: Path) -> None:
    recipe = RECIPES[name].pretrain_recipe(dir=str(tmp_path), name="x")
    packed = ZlibJSONSerializer()
    assert packed.deserialize(packed.serialize(recipe)) == recipe
    recipe.trainer.accelerator = "cpu"
    made = fdl.build(recipe).keywords
    assert made["trainer"].max_steps == recipe.trainer.max_steps
    assert made["trainer"].precision_plugin.level.name in ("bf16_mixed", "bf16_with_fp8_mixed")
    with torch.device("meta"):
        model = CausalLM(recipe.model.preset, vocab_size=recipe.data.vocab_size, init_seed=None)
        if "vocab_size" not in PRESETS[recipe.model.preset].config:
            model.configure_model()
            assert model.model.config.vocab_size >= recipe.data.vocab_size
    assert made["data"].seq_length <= PRESETS[recipe.model.preset].config["max_position_embeddings"]


def test_plugin_of_a_recipe_is_replaced_and_run(data_dir: Path, tmp_path: Path) -> None:
    recipe = small(data_dir, tmp_path)
    recipe.trainer.plugins = fp16_mixed(initial_loss_scale=256.0)
    run.run(recipe, executor=run.LocalExecutor(), direct=True)
    saved = torch.load(tmp_path / "run" / "fp16_mixed" / "checkpoints" / "last.ckpt", weights_only=False)
    assert saved["global_step"] == 2
    assert (tmp_path / "run" / "fp16_mixed" / "csv" / "metrics.csv").is_file()
    assert list((tmp_path / "run" / "fp16_mixed" / "tensorboard").glob("events*"))


@pytest.mark.slow
def test_recipe_runs_in_a_process_of_the_local_executor(
    data_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # LocalExecutor starts the `python` of PATH, which is another one where this environment is not activated.
    monkeypatch.setenv("PATH", os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))
    recipe = small(data_dir, tmp_path)
    recipe.trainer.plugins = bf16_mixed()
    root = str(Path(recipes.__file__).parents[2])
    executor = run.LocalExecutor(env_vars={"PYTHONPATH": root})
    run.run(recipe, executor=executor, name="test", tail_logs=False)
    saved = torch.load(tmp_path / "run" / "bf16_mixed" / "checkpoints" / "last.ckpt", weights_only=False)
    assert saved["global_step"] == 2


def test_command_line_runs_a_recipe(data_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    argv = sys.argv
    status = main(
        [
            "run",
            "--yes",
            "--factory",
            f"tiny(dir='{tmp_path}', name='run', max_steps=1)",
            "trainer.plugins=bf16_with_fp8_mixed",
            "trainer.plugins.fp8_margin=1",
            "trainer.plugins.backend=reference",
            "trainer.accelerator=cpu",
            "trainer.enable_progress_bar=False",
            f"model.config={CONFIG}",
            f"data.train_prefix={data_dir / 'train'}",
            f"data.validation_prefix={data_dir / 'validation'}",
            "data.max_bytes=None",
            "data.seq_length=32",
            "data.micro_batch_size=4",
            "data.validation_samples=8",
        ]
    )
    assert status == 0 and sys.argv is argv
    out = capsys.readouterr().out
    assert "trainer.plugins.fp8_margin = 1\n" in out and "Dry run" not in out and "global options" not in out
    saved = torch.load(tmp_path / "run" / "bf16_with_fp8_mixed" / "checkpoints" / "last.ckpt", weights_only=False)
    assert saved["global_step"] == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["trainer.plugins=fp17_mixed"], "Unknown precision level 'fp17_mixed'. Choose one of: fp16_amp,"),
        (["trainer.plugins=msamp_o4"], "Unknown precision level 'msamp_o4'. Choose one of: fp16_amp,"),
        (["--factory", "llama9"], "Unknown recipe 'llama9'. Choose one of: tiny,"),
        (["trainer.plugins.fp8_margin=abc"], "trainer.plugins.fp8_margin=abc: Failed to parse 'abc' as int"),
        (["trainer.plugins.fp9=1"], "bf16_with_fp8_mixed has no argument 'fp9'. It takes: fp8, fp8_margin,"),
    ],
)
def test_mistake_on_the_command_line_is_one_sentence(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture
) -> None:
    assert main(["run", "--yes", *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1

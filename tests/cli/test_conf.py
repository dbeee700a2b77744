"""The Hydra groups: every choice of every group makes what it says."""

import inspect
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_dir

import nemo_lowprec
from nemo_lowprec import LowPrecision
from nemo_lowprec.chart import CHART
from nemo_lowprec.conf.job import CONF_DIR, build
from nemo_lowprec.conf.levels import register_levels
from nemo_lowprec.data import TextDataModule
from nemo_lowprec.models import PRESETS, CausalLM

# What a choice leaves to be said.
NEEDED = {
    "data=text": ["data.source=texts", "data.data_dir=prepared"],
    "data=megatron": ["data.train_prefix=train", "data.validation_prefix=validation", "data.vocab_size=100"],
    "experiment=llama32_1b": ["data.source=texts", "data.data_dir=prepared"],
}
CHOICES = [
    f"{group.name}={choice.stem}"
    for group in sorted(CONF_DIR.iterdir())
    if group.is_dir()
    for choice in sorted(group.glob("*.yaml"))
]


def made(tmp_path: Path, *overrides: str) -> dict[str, Any]:
    register_levels()
    with initialize_config_dir(str(CONF_DIR), version_base="1.3"):
        cfg = compose("config", overrides=[f"output_dir={tmp_path}", "trainer.accelerator=cpu", *overrides])
    return build(cfg)


def test_groups_are_those_of_the_readme() -> None:
    groups = {choice.partition("=")[0] for choice in CHOICES}
    assert groups == {"model", "data", "trainer", "strategy", "logger", "experiment"}


@pytest.mark.parametrize("choice", CHOICES)
def test_choice_makes_objects(choice: str, tmp_path: Path) -> None:
    parts = made(tmp_path, choice, *NEEDED.get(choice, []))
    assert isinstance(parts["model"], CausalLM) and isinstance(parts["data"], TextDataModule)
    assert isinstance(parts["trainer"].precision_plugin, LowPrecision)
    group, _, name = choice.partition("=")
    if group == "model":
        assert parts["model"].hparams["preset"] == name
    if group == "logger":
        expected = {"default": 2, "csv": 1, "tensorboard": 1, "none": 0}[name]
        assert len(parts["trainer"].loggers) == expected


def test_each_preset_is_a_choice_of_the_model_group() -> None:
    assert {path.stem for path in (CONF_DIR / "model").glob("*.yaml")} == set(PRESETS)


def test_each_experiment_tells_how_to_run_it() -> None:
    for path in (CONF_DIR / "experiment").glob("*.yaml"):
        comment = [line for line in path.read_text().splitlines() if line.startswith("#")]
        assert any("nemo-lowprec pretrain" in line and f"experiment={path.stem}" in line for line in comment), path


@pytest.mark.parametrize("name", list(CHART))
def test_level_is_a_choice_with_the_arguments_of_its_function(name: str, tmp_path: Path) -> None:
    plugin = made(tmp_path, f"precision={name}")["trainer"].precision_plugin
    assert plugin.level.name == name
    defaults = {k: p.default for k, p in inspect.signature(getattr(nemo_lowprec, name)).parameters.items()}
    listed = {k: tuple(v) if isinstance(v, list) else v for k, v in plugin.options.items()}
    assert listed == defaults


def test_seed_is_that_of_the_initial_weights_and_not_of_the_data(tmp_path: Path) -> None:
    parts = made(tmp_path, "seed=7")
    assert parts["model"].hparams["init_seed"] == 7
    assert parts["data"].seed == 0

"""The Hydra groups: every choice of every group makes what it says."""

import inspect
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from hydra import compose, initialize_config_dir
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from omegaconf import DictConfig

import nemo_lowprec
from nemo_lowprec import LowPrecision
from nemo_lowprec.chart import CHART
from nemo_lowprec.conf.check import check_config
from nemo_lowprec.conf.choices import CONF_DIR, register_levels
from nemo_lowprec.conf.job import build
from nemo_lowprec.data import TextDataModule
from nemo_lowprec.models import PRESETS, CausalLM, MegatronGPT
from nemo_lowprec.strategies import MegatronStrategy

# What a choice leaves to be said.
NEEDED = {
    "data=text": ["data.source=texts", "data.data_dir=prepared"],
    "data=megatron": ["data.train_prefix=train", "data.validation_prefix=validation", "data.vocab_size=100"],
    "experiment=llama32_1b": ["data.source=texts", "data.data_dir=prepared"],
    "experiment=megatron_llama3_8b": ["data.source=texts", "data.data_dir=prepared"],
}
ON_MEGATRON = ["strategy=lowprec_megatron", "experiment=megatron_tiny", "experiment=megatron_llama3_8b"]
CHOICES = [
    f"{group.name}={choice.stem}"
    for group in sorted(CONF_DIR.iterdir())
    if group.is_dir()
    for choice in sorted(group.glob("*.yaml"))
]


def composed(tmp_path: Path, *overrides: str) -> DictConfig:
    register_levels()
    with initialize_config_dir(str(CONF_DIR), version_base="1.3"):
        return compose("config", overrides=[f"output_dir={tmp_path}", "trainer.accelerator=cpu", *overrides])


def made(tmp_path: Path, *overrides: str) -> dict[str, Any]:
    return build(composed(tmp_path, *overrides))


@pytest.fixture
def as_with_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let MegatronStrategy be made on any machine."""
    monkeypatch.setattr("nemo_lowprec.strategies.megatron.check_megatron", lambda: None)


def test_groups_are_those_of_the_readme() -> None:
    groups = {choice.partition("=")[0] for choice in CHOICES}
    assert groups == {"model", "data", "trainer", "strategy", "logger", "monitor", "experiment"}


@pytest.mark.parametrize("choice", CHOICES)
def test_choice_makes_objects(choice: str, tmp_path: Path, as_with_gpu: None) -> None:
    parts = made(tmp_path, choice, *NEEDED.get(choice, []))
    assert isinstance(parts["model"], CausalLM) and isinstance(parts["data"], TextDataModule)
    assert isinstance(parts["trainer"].precision_plugin, LowPrecision)
    group, _, name = choice.partition("=")
    if group == "model":
        assert parts["model"].hparams["preset"] == name.removeprefix("megatron_")
    if group in ("model", "experiment"):
        assert isinstance(parts["model"], MegatronGPT) == name.startswith("megatron_")
    if group == "logger":
        expected = {"default": 2, "csv": 1, "tensorboard": 1, "none": 0}[name]
        assert len(parts["trainer"].loggers) == expected


def test_each_preset_is_a_choice_of_the_model_group() -> None:
    choices = {path.stem for path in (CONF_DIR / "model").glob("*.yaml")}
    on_megatron = {choice for choice in choices if choice.startswith("megatron_")}
    assert choices - on_megatron == set(PRESETS)
    assert {choice.removeprefix("megatron_") for choice in on_megatron} <= set(PRESETS)


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


def test_the_trainer_lists_all_arguments_that_no_other_group_gives(tmp_path: Path) -> None:
    listed = set(composed(tmp_path, "strategy=ddp").trainer) - {"_target_"}
    elsewhere = {"precision", "plugins", "callbacks", "model_registry"}  # strategy, devices, ... are of other groups
    assert listed == set(inspect.signature(Trainer).parameters) - elsewhere


def test_the_checkpoint_lists_all_arguments(tmp_path: Path) -> None:
    assert set(composed(tmp_path).checkpoint) - {"_target_"} == set(inspect.signature(ModelCheckpoint).parameters)


@pytest.mark.parametrize("name", ["text", "stdlib", "stdlib_small"])
def test_the_data_list_all_arguments_but_those_of_prepared_files(name: str, tmp_path: Path) -> None:
    listed = set(composed(tmp_path, f"data={name}").data) - {"_target_"}
    assert listed == set(inspect.signature(TextDataModule).parameters) - {"train_prefix", "validation_prefix"}


def test_a_timeout_is_a_node_of_its_own(tmp_path: Path) -> None:
    timeout = "+trainer.strategy.timeout={_target_: datetime.timedelta, minutes: 7}"
    cfg = composed(tmp_path, "strategy=lowprec_sharded", timeout)
    check_config(cfg)
    assert build(cfg)["trainer"].strategy._timeout == timedelta(minutes=7)


@pytest.mark.parametrize("choice", CHOICES)
def test_every_choice_passes_the_check(choice: str, tmp_path: Path) -> None:
    check_config(composed(tmp_path, choice, *NEEDED.get(choice, [])))


def test_seed_is_that_of_the_initial_weights_and_not_of_the_data(tmp_path: Path) -> None:
    parts = made(tmp_path, "seed=7")
    assert parts["model"].hparams["init_seed"] == 7
    assert parts["data"].seed == 0


@pytest.mark.parametrize("choice", ON_MEGATRON)
def test_without_a_gpu_only_the_strategy_of_megatron_is_not_made(
    choice: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(RuntimeError, match="MegatronStrategy needs an NVIDIA GPU"):
        made(tmp_path, choice, *NEEDED.get(choice, []))


def defaults(function: Any) -> dict[str, Any]:
    kinds = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    return {n: p.default for n, p in inspect.signature(function).parameters.items() if p.kind not in kinds}


def test_strategy_lists_all_arguments_with_their_defaults(tmp_path: Path) -> None:
    strategy = dict(composed(tmp_path, "strategy=lowprec_megatron").trainer.strategy)
    assert strategy.pop("_target_") == "nemo_lowprec.strategies.MegatronStrategy"
    assert strategy == defaults(MegatronStrategy)


@pytest.mark.parametrize("name", [c.partition("=")[2] for c in CHOICES if c.startswith("model=megatron_")])
def test_model_on_megatron_lists_all_arguments(name: str, tmp_path: Path) -> None:
    model = set(composed(tmp_path, f"model={name}").model) - {"_target_", "_convert_"}
    assert model == set(defaults(MegatronGPT)) - {"model_type"}  # which is for architectures without a preset


def test_sizes_of_megatron_are_set(tmp_path: Path, as_with_gpu: None) -> None:
    sizes = ["tensor_model_parallel_size=2", "sequence_parallel=true", "checkpoint_form=dp_reshardable"]
    overrides = [f"trainer.strategy.{size}" for size in sizes]
    trainer = made(tmp_path, "experiment=megatron_tiny", "nodes=2", "gpus=4", *overrides)["trainer"]
    strategy = trainer.strategy
    assert (strategy.layout.tensor, strategy.layout.sequence_parallel) == (2, True)
    assert strategy.checkpoint_form == "dp_reshardable"
    assert (trainer.num_nodes, trainer.num_devices, trainer.gradient_clip_val) == (2, 4, 1.0)


def test_experiment_and_recipe_of_a_model_are_the_same(tmp_path: Path) -> None:
    from nemo_lowprec.recipes import megatron_llama3_8b, megatron_tiny

    for recipe in (megatron_llama3_8b, megatron_tiny):
        choice = f"experiment={recipe.NAME}"
        cfg, config = composed(tmp_path, choice, *NEEDED.get(choice, [])), recipe.pretrain_recipe()
        assert (
            dict(cfg.trainer.strategy).items()
            >= {name: getattr(config.trainer.strategy, name) for name in defaults(MegatronStrategy)}.items()
        )
        for name in ("accumulate_grad_batches", "max_steps", "gradient_clip_val", "val_check_interval", "devices"):
            assert cfg.trainer[name] == getattr(config.trainer, name), name
        for name in ("seq_length", "micro_batch_size"):
            assert cfg.data[name] == getattr(config.data, name), name
        for name in ("preset", "lr", "min_lr"):
            assert cfg.model[name] == getattr(config.model, name), name
        assert cfg.precision["_target_"] == "nemo_lowprec.bf16_mixed"


@pytest.mark.parametrize(("text", "is_auto"), [("auto", True), ("null", False), ("[auto]", False), ("'*'", False)])
def test_convert_is_auto_unless_layers_are_named(tmp_path: Path, text: str, is_auto: bool) -> None:
    level = "precision=bf16_with_fp8_mixed"
    assert made(tmp_path, level)["trainer"].precision_plugin.engine.options.layers.is_auto
    plugin = made(tmp_path, level, f"precision.convert={text}")["trainer"].precision_plugin
    assert plugin.engine.options.layers.is_auto == is_auto

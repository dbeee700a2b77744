"""The recipes on Megatron-core: as configs on any machine, up to the strategy that needs a GPU."""

import inspect
from typing import Any

import fiddle as fdl
import nemo_run as run
import pytest
import torch
from nemo_run.cli.cli_parser import parse_cli_args
from nemo_run.core.serialization.yaml import YamlSerializer
from nemo_run.core.serialization.zlib_json import ZlibJSONSerializer

from nemo_lowprec.cli import main
from nemo_lowprec.megatron import ParallelLayout
from nemo_lowprec.models import PRESETS, MegatronGPT
from nemo_lowprec.recipes import (
    lowprec_megatron,
    megatron_llama3_8b,
    megatron_llama3_70b,
    megatron_llama32_1b,
    megatron_tiny,
    tiny,
)
from nemo_lowprec.strategies import MegatronStrategy

RECIPES = {
    recipe.NAME: recipe for recipe in (megatron_tiny, megatron_llama32_1b, megatron_llama3_8b, megatron_llama3_70b)
}
# NeMo's choices: tensor, pipeline, virtual pipeline, context; sequence parallel; nodes, GPUs of each.
PUBLISHED = {
    "megatron_llama32_1b": ((1, 1, None, 1, False), (1, 8)),
    "megatron_llama3_8b": ((1, 1, None, 2, False), (1, 8)),
    "megatron_llama3_70b": ((4, 4, 5, 2, True), (4, 8)),
}


def layout(strategy: run.Config) -> ParallelLayout:
    return ParallelLayout(
        strategy.tensor_model_parallel_size,
        strategy.pipeline_model_parallel_size,
        strategy.virtual_pipeline_model_parallel_size,
        strategy.context_parallel_size,
        strategy.expert_model_parallel_size,
        strategy.sequence_parallel,
    )


@pytest.fixture
def without_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.fixture
def as_with_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nemo_lowprec.strategies.megatron.check_megatron", lambda: None)


@pytest.mark.parametrize("name", RECIPES)
def test_sizes_fit_the_gpus_the_model_and_the_data(name: str) -> None:
    recipe = RECIPES[name].pretrain_recipe()
    sizes, trainer = layout(recipe.trainer.strategy), recipe.trainer
    world = trainer.num_nodes * trainer.devices
    sizes.check_world(world)
    model = PRESETS[recipe.model.preset].config
    assert model["num_hidden_layers"] % (sizes.pipeline * (sizes.virtual_pipeline or 1)) == 0
    assert model["num_key_value_heads"] % sizes.tensor == 0
    assert recipe.data.seq_length <= model["max_position_embeddings"]
    assert recipe.data.seq_length % (2 * sizes.context * sizes.tensor) == 0
    assert trainer.accumulate_grad_batches % sizes.pipeline == 0
    assert trainer.val_check_interval % trainer.accumulate_grad_batches == 0


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_models_have_nemos_sizes_and_batch(name: str) -> None:
    recipe = RECIPES[name].pretrain_recipe()
    (tensor, pipeline, virtual, context, sequence), gpus = PUBLISHED[name]
    assert layout(recipe.trainer.strategy) == ParallelLayout(
        tensor, pipeline, virtual, context, sequence_parallel=sequence
    )
    assert (recipe.trainer.num_nodes, recipe.trainer.devices) == gpus
    data_parallel = gpus[0] * gpus[1] // (tensor * pipeline * context)
    batch = recipe.data.micro_batch_size * recipe.trainer.accumulate_grad_batches * data_parallel
    assert (batch, recipe.data.seq_length) == (512, 8192)


@pytest.mark.parametrize("name", RECIPES)
def test_recipe_survives_its_journey_to_the_executor(name: str) -> None:
    recipe = RECIPES[name].pretrain_recipe(dir="runs", name="x", num_nodes=2)
    recipe.trainer.strategy.bucket_size = 1000
    packed, text = ZlibJSONSerializer(), YamlSerializer()
    assert packed.deserialize(packed.serialize(recipe)) == recipe
    for config in (recipe.model, recipe.trainer.strategy):  # a Trainer's callbacks nemo_run does not read from YAML
        assert text.deserialize(text.serialize(config)) == config


@pytest.mark.parametrize("name", RECIPES)
def test_recipe_builds_up_to_the_strategy_that_needs_a_gpu(name: str, without_gpu: None) -> None:
    with pytest.raises(RuntimeError, match="MegatronStrategy needs an NVIDIA GPU"):
        fdl.build(RECIPES[name].pretrain_recipe())


@pytest.mark.parametrize("name", RECIPES)
def test_recipe_builds(name: str, as_with_gpu: None) -> None:
    recipe = RECIPES[name].pretrain_recipe(dir="runs", name="x", num_gpus_per_node=2, max_steps=7)
    recipe.trainer.accelerator = "cpu"
    made = fdl.build(recipe).keywords
    trainer, model = made["trainer"], made["model"]
    assert isinstance(trainer.strategy, MegatronStrategy) and trainer.strategy.layout == layout(recipe.trainer.strategy)
    assert (trainer.gradient_clip_val, trainer.max_steps, trainer.num_devices) == (1.0, 7, 2)
    assert trainer.precision_plugin.level.name == "bf16_mixed"
    assert isinstance(model, MegatronGPT) and f"megatron_{model.hparams['preset']}".replace("_llama_", "_") == name
    assert trainer.checkpoint_callback.dirpath.endswith("runs/x/bf16_mixed/checkpoints")


def test_one_gpu_is_megatrons_too() -> None:
    recipe = megatron_tiny.pretrain_recipe()
    assert (recipe.trainer.num_nodes, recipe.trainer.devices) == (1, 1)
    assert recipe.trainer.strategy == lowprec_megatron()


def test_factory_has_the_strategys_arguments_and_defaults() -> None:
    wanted = {n: p.default for n, p in inspect.signature(MegatronStrategy).parameters.items() if n != "options"}
    assert {n: p.default for n, p in inspect.signature(lowprec_megatron).parameters.items()} == wanted
    assert fdl.ordered_arguments(lowprec_megatron()) == wanted
    changed = {name: "another" for name in wanted}
    assert fdl.ordered_arguments(lowprec_megatron(**changed)) == changed


def override(recipe: Any, *arguments: str) -> Any:
    return parse_cli_args(recipe.pretrain_recipe(), list(arguments))


def test_sizes_are_set_on_the_command_line(as_with_gpu: None) -> None:
    recipe = override(
        megatron_llama3_70b,
        "trainer.strategy.tensor_model_parallel_size=8",
        "trainer.strategy.virtual_pipeline_model_parallel_size=None",
        "trainer.strategy.sequence_parallel=False",
        "trainer.strategy.overlap_param_gather=False",
        "trainer.strategy.bucket_size=40000000",
        "trainer.strategy.checkpoint_form=dp_reshardable",
        "trainer.strategy.process_group_backend=nccl",
        "trainer.accumulate_grad_batches=256",
    )
    strategy = fdl.build(recipe.trainer.strategy)
    assert strategy.layout == ParallelLayout(tensor=8, pipeline=4, context=2)
    assert (strategy.checkpoint_form, strategy.process_group_backend) == ("dp_reshardable", "nccl")
    assert (recipe.trainer.strategy.overlap_param_gather, recipe.trainer.strategy.bucket_size) == (False, 40_000_000)
    assert recipe.trainer.accumulate_grad_batches == 256


def test_strategy_is_found_on_the_command_line(as_with_gpu: None) -> None:
    recipe = override(tiny, "trainer.strategy=lowprec_megatron(overlap_grad_reduce=False,bucket_size=7)")
    assert recipe.trainer.strategy == lowprec_megatron(overlap_grad_reduce=False, bucket_size=7)


def test_model_is_found_and_changed_on_the_command_line() -> None:
    assert override(tiny, "model=megatron_llama3_8b").model == megatron_llama3_8b.model()
    model = fdl.build(
        override(
            megatron_tiny,
            "model.lr=0.01",
            "model.betas=(0.9,0.99)",
            "model.weights=folder",
            "model.transformer={'recompute_granularity': 'selective'}",
            "model.activation_checkpointing=True",
            "model.warmup_steps=3",
        ).model
    )
    assert {name: model.hparams[name] for name in ("lr", "betas", "weights", "warmup_steps")} == {
        "lr": 0.01, "betas": (0.9, 0.99), "weights": "folder", "warmup_steps": 3,
    }  # fmt: skip
    assert model.hparams["transformer"] == {"recompute_granularity": "selective"}
    assert model.hparams["activation_checkpointing"] is True


def test_arguments_of_other_strategies_are_set_on_the_command_line() -> None:
    recipe = override(tiny, "trainer.strategy=lowprec_sharded", "trainer.strategy.shard_size=4")
    assert recipe.trainer.strategy.shard_size == 4
    recipe = override(tiny, "trainer.strategy=lowprec_ddp", "trainer.strategy.bucket_cap_mb=12.5")
    assert recipe.trainer.strategy.bucket_cap_mb == 12.5


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--factory", "megatron_llama3_8b"], "MegatronStrategy needs an NVIDIA GPU with CUDA"),
        (["trainer.strategy=lowprec_megatron"], "MegatronStrategy needs an NVIDIA GPU with CUDA"),
        (["--factory", "megatron_tiny", "trainer.strategy.sequence_parallel=True"], "parallel_size is 1. Leave it out"),
        (["--factory", "megatron_tiny", "trainer.strategy.bucket_size=many"], "Failed to parse 'many'"),
        (["--factory", "megatron_9b"], "Choose one of: tiny, llama32_1b, llama3_8b, megatron_tiny,"),
    ],
)
def test_mistake_on_the_command_line_is_one_sentence(
    arguments: list[str], message: str, without_gpu: None, capsys: pytest.CaptureFixture
) -> None:
    assert main(["run", "--yes", *arguments]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("nemo-lowprec run: ") and message in error

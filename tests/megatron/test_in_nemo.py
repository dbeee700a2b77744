"""The levels in a recipe of NeMo 2, up to where a GPU is needed. For an environment of its own, which has NeMo."""

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fiddle as fdl
import pytest
import torch

llm = pytest.importorskip("nemo.collections.llm", reason="needs nemo-toolkit, in an environment of its own")

from nemo.collections.llm.recipes.precision import mixed_precision as theirs  # noqa: E402
from nemo.lightning.io import load_context  # noqa: E402
from nemo.lightning.io.pl import TrainerContext  # noqa: E402

from nemo_lowprec import recipes  # noqa: E402
from nemo_lowprec.chart import CHART  # noqa: E402
from nemo_lowprec.plugins.nemo import NemoPrecision  # noqa: E402
from tests.megatron.test_nemo import DIFFERENT, NEAREST, SAME, THEIRS  # noqa: E402


def recipe_with(plugins: Any) -> Any:
    """NeMo's recipe of Llama 3 8B for one process of this machine, with two small layers."""
    recipe = llm.llama3_8b.pretrain_recipe(dir="unused", name="unused", num_nodes=1, num_gpus_per_node=1)
    recipe.trainer.plugins = plugins
    recipe.trainer.accelerator, recipe.trainer.strategy.context_parallel_size = "cpu", 1
    sizes = {"num_layers": 2, "hidden_size": 64, "ffn_hidden_size": 128, "num_attention_heads": 4, "kv_channels": 16,
             "num_query_groups": 2, "vocab_size": 512, "seq_length": 32, "apply_rope_fusion": False}  # fmt: skip
    for name, value in sizes.items():
        setattr(recipe.model.config, name, value)
    return recipe


def connected(plugins: Any) -> Any:
    """Trainer, model and the three configs once NeMo's strategy has read the plugin."""
    recipe = recipe_with(plugins)
    trainer, model = fdl.build(recipe.trainer), fdl.build(recipe.model)
    model.optim = fdl.build(recipe.optim)
    model.optim.connect(model)
    model.trainer = trainer
    trainer.strategy.connect(model)
    configs = (model.config, model.optim.config, trainer.strategy.ddp_config)
    return SimpleNamespace(trainer=trainer, model=model, configs=configs)


@pytest.mark.parametrize("name", THEIRS)
def test_configs_are_those_of_nemos_recipe_of_the_name(name: str) -> None:
    ours = connected(getattr(recipes, name)(**SAME.get(name, {})))
    nemos = connected(getattr(theirs, name)())
    # Without low-precision GEMMs these choose nothing, and the level leaves them alone.
    unused = () if CHART[name].has_fp8 else ("fp8_recipe", "num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16")
    other = {}
    for our, their in zip(ours.configs, nemos.configs, strict=True):
        for field, value in vars(our).items():
            plain = isinstance(value, bool | int | float | str | torch.dtype | None)
            if plain and value != getattr(their, field) and field not in unused:
                other[field] = value
    assert other == DIFFERENT.get(name, {})
    assert ours.trainer.strategy.pipeline_dtype == nemos.trainer.strategy.pipeline_dtype


@pytest.mark.parametrize("name", NEAREST)
def test_other_levels_are_refused_when_the_strategy_connects(name: str) -> None:
    with pytest.raises(ValueError, match=f"Use {NEAREST[name]}"):
        connected(getattr(recipes, name)())


def test_context_of_a_checkpoint_holds_the_level(tmp_path: Path) -> None:
    run = connected(recipes.bf16_with_fp8_mixed(fp8_params=True, fp8_margin=1))
    TrainerContext(run.model, run.trainer, {}).io_dump(tmp_path, yaml_attrs=["model"])
    again = load_context(tmp_path).trainer.precision_plugin
    assert (again.level.name, again.options) == ("bf16_with_fp8_mixed", {"fp8_params": True, "fp8_margin": 1})


@pytest.fixture
def one_process(monkeypatch: pytest.MonkeyPatch) -> Any:
    from megatron.core import parallel_state

    for name, value in {"MASTER_ADDR": "localhost", "MASTER_PORT": "0", "RANK": "0", "WORLD_SIZE": "1"}.items():
        monkeypatch.setitem(os.environ, name, value)
    torch.distributed.init_process_group("gloo")
    parallel_state.initialize_model_parallel()
    yield
    parallel_state.destroy_model_parallel()
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("name", ["bf16_mixed", "fp16_mixed"])
def test_nemos_megatron_parallel_converts_by_the_level(name: str) -> None:
    from megatron.core.transformer.module import Float16Module
    from nemo.lightning.megatron_parallel import MegatronParallel

    run = connected(getattr(recipes, name)())
    plugin, strategy = run.trainer.precision_plugin, run.trainer.strategy
    run.model.config.use_cpu_initialization, run.model.config.persist_layer_norm = True, False
    run.model.configure_model()
    parallel = MegatronParallel(run.model, precision_plugin=plugin, cpu=True, convert_module_fn=plugin.convert_module)
    strategy.megatron_parallel = parallel
    parallel.apply_convert_module_fn()
    assert type(strategy.precision_plugin) is NemoPrecision is type(parallel.precision_plugin)
    assert isinstance(run.model.module, Float16Module)
    assert {p.dtype for p in run.model.parameters()} == {run.model.config.params_dtype}
    assert plugin.engine.model is None
    strategy.precision_plugin.teardown()
    assert strategy.precision_plugin is plugin

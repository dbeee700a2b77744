"""What NeMo's own MegatronStrategy gets of a level: its ``dtype_config``, and the plugin that stands in there."""

import copy
import dataclasses
import pickle
import sys
from types import SimpleNamespace

import fiddle as fdl
import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.strategies import DDPStrategy
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import Float16Module, MegatronModule
from torch import nn

import nemo_lowprec
from nemo_lowprec import LowPrecision
from nemo_lowprec.chart import CHART
from nemo_lowprec.plugins.nemo import NemoPrecision, runs
from nemo_lowprec.strategies import MegatronStrategy

# nemo-toolkit 2.7.3, nemo/collections/llm/recipes/precision/mixed_precision.py: what each recipe hands to
# MegatronMixedPrecision, whose dtype_config has it under these names (fp8_param too is fp8_param_gather).
BF16 = {
    "fp16": False, "bf16": True, "params_dtype": torch.bfloat16, "pipeline_dtype": torch.bfloat16,
    "autocast_dtype": torch.bfloat16, "grad_reduce_in_fp32": True, "fp8": None, "fp4": None, "fp8_param": False,
    "fp8_param_gather": False,
}  # fmt: skip
FP16 = BF16 | {
    "fp16": True, "bf16": False, "params_dtype": torch.half, "pipeline_dtype": torch.half,
    "grad_reduce_in_fp32": False, "loss_scale": None, "initial_loss_scale": 2**32, "min_loss_scale": 1.0,
    "loss_scale_window": 1000, "hysteresis": 2,
}  # fmt: skip
FP8 = {
    "fp8": "hybrid", "fp8_wgrad": True, "first_last_layers_bf16": False, "num_layers_at_start_in_bf16": 0,
    "num_layers_at_end_in_bf16": 0, "reuse_grad_buf_for_mxfp8_param_ag": False,
}  # fmt: skip
STORED = {"fp8_param": True, "fp8_param_gather": True}
DELAYED = FP8 | STORED | {
    "fp8_recipe": "delayed", "fp8_margin": 0, "fp8_amax_history_len": 1024, "fp8_amax_compute_algo": "max",
}  # fmt: skip
FIRST_LAST = {"first_last_layers_bf16": True, "num_layers_at_start_in_bf16": 1, "num_layers_at_end_in_bf16": 1}
THEIRS = {
    "bf16_mixed": BF16,
    "fp16_mixed": FP16,
    "bf16_with_fp8_mixed": BF16 | DELAYED,
    "fp16_with_fp8_mixed": FP16 | DELAYED,
    "bf16_with_fp8_current_scaling_mixed": BF16 | FP8 | STORED | {"fp8_recipe": "tensorwise"} | FIRST_LAST,
    "bf16_with_fp8_subchannel_scaling_mixed": BF16 | FP8 | {"fp8_recipe": "blockwise"},
    "bf16_with_mxfp8_mixed": BF16 | FP8 | STORED
    | {"fp8": "e4m3", "fp8_recipe": "mxfp8", "reuse_grad_buf_for_mxfp8_param_ag": True},
}  # fmt: skip

# The arguments that make a level NeMo's recipe of its name.
SAME = {
    "fp16_mixed": {"initial_loss_scale": 2.0**32},
    "bf16_with_fp8_mixed": {"fp8_params": True},
    "fp16_with_fp8_mixed": {"fp8_params": True, "initial_loss_scale": 2.0**32},
    "bf16_with_fp8_current_scaling_mixed": {
        "fp8_params": True, "num_layers_at_start_in_half": 1, "num_layers_at_end_in_half": 1,
    },
    "bf16_with_fp8_subchannel_scaling_mixed": {"fp8": "hybrid"},
}  # fmt: skip

# What differs all the same. NeMo's autocast is of FP32 where it is not of BF16, and off; its recipes end a run at the
# first gradient that is not finite, where a loss scale skips the step; it stores MXFP8 weights.
DIFFERENT = {
    "fp16_mixed": {"autocast_dtype": torch.half, "check_for_nan_in_grad": False},
    "fp16_with_fp8_mixed": {"autocast_dtype": torch.half, "check_for_nan_in_grad": False},
    "bf16_with_mxfp8_mixed": {
        "fp8_param": False, "fp8_param_gather": False, "reuse_grad_buf_for_mxfp8_param_ag": False,
    },
}  # fmt: skip

# The level that a refused one is named in the place of.
NEAREST = {
    "fp16_amp": "fp16_mixed",
    "te_fp8": "bf16_with_fp8_mixed",
    "msamp_o1": "bf16_with_fp8_mixed",
    "msamp_o2": "bf16_with_fp8_mixed",
    "msamp_o3": "bf16_with_fp8_mixed",
}
LEVELS = [name for name in CHART if name not in NEAREST and CHART[name].scaling != "rowwise"]


def plugin_of(name, **options):
    return getattr(nemo_lowprec, name)(**options)


def copied(config):
    """Megatron-core's three configs after NeMo's update_config_with_dtype_overrides."""
    configs = (
        TransformerConfig(num_layers=4, hidden_size=64, num_attention_heads=4),
        OptimizerConfig(use_distributed_optimizer=True),
        DistributedDataParallelConfig(check_for_nan_in_grad=True),
    )
    for target in configs:
        for field in dataclasses.fields(config):
            if hasattr(target, field.name):
                setattr(target, field.name, getattr(config, field.name))
    return configs


@pytest.mark.parametrize("name", THEIRS)
def test_level_is_nemos_recipe_of_its_name(name):
    ours = dataclasses.asdict(plugin_of(name, **SAME.get(name, {})).dtype_config)
    assert ours == THEIRS[name] | DIFFERENT.get(name, {})


def test_nvfp4_which_nemo_has_no_recipe_of():
    ours = dataclasses.asdict(plugin_of("bf16_with_nvfp4_mixed").dtype_config)
    assert ours == BF16 | {"fp4": "e2m1", "fp4_recipe": "nvfp4"}


def test_every_level_is_told_of():
    assert set(LEVELS) == {*THEIRS, "bf16_with_nvfp4_mixed"}


@pytest.mark.parametrize("name", LEVELS)
def test_each_field_gets_where_the_settings_have_it(name):
    plugin = plugin_of(name, **SAME.get(name, {}))
    settings, config = plugin.megatron(), plugin.dtype_config
    model, optimizer, ddp = copied(config)
    names = {field.name for field in dataclasses.fields(config)}
    assert all(any(hasattr(target, name) for target in (model, optimizer, ddp)) for name in names)
    for target, wanted in ((model, settings.model), (optimizer, settings.optimizer), (ddp, settings.ddp)):
        for field in names & wanted.keys():
            assert getattr(target, field) == wanted[field], field
    assert (optimizer.fp16, optimizer.bf16) == (model.fp16, model.bf16)
    assert ddp.check_for_nan_in_grad != model.fp16


def test_arguments_reach_it():
    config = plugin_of(
        "fp16_with_fp8_mixed", fp8="e4m3", fp8_margin=1, fp8_amax_history_len=16, fp8_amax_compute_algo="most_recent",
        loss_scale=128.0, hysteresis=3,
    ).dtype_config  # fmt: skip
    assert (config.fp8, config.fp8_margin, config.fp8_amax_history_len) == ("e4m3", 1, 16)
    assert (config.fp8_amax_compute_algo, config.loss_scale, config.hysteresis) == ("most_recent", 128.0, 3)


def test_it_is_frozen_and_the_same_each_time():
    plugin = plugin_of("bf16_with_fp8_mixed")
    assert plugin.dtype_config == plugin.dtype_config == plugin_of("bf16_with_fp8_mixed").dtype_config
    assert plugin.dtype_config != plugin_of("bf16_with_fp8_mixed", fp8_margin=1).dtype_config
    with pytest.raises(dataclasses.FrozenInstanceError):
        plugin.dtype_config.fp8 = None


@pytest.mark.parametrize("name", NEAREST)
def test_levels_that_nemos_strategy_cannot_train(name):
    with pytest.raises(ValueError, match=f"{name} .*NeMo's MegatronStrategy.* Use {NEAREST[name]}, or "):
        _ = plugin_of(name).dtype_config


def test_rowwise_scaling_is_not_transformer_engines():
    with pytest.raises(
        ValueError, match=r"bf16_with_fp8_rowwise_mixed: Transformer Engine.* Use bf16_with_fp8_current"
    ):
        _ = plugin_of("bf16_with_fp8_rowwise_mixed").dtype_config


def test_fp16_levels_are_named_to_an_fp16_level():
    with pytest.raises(ValueError, match="Use fp16_with_fp8_mixed, or"):
        _ = plugin_of("msamp_o2", half="fp16").dtype_config


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"attention": "cudnn"}, "attention='cudnn': NeMo takes.*attention_backend=AttnBackend.fused"),
        ({"backend": "torch"}, "backend='torch': .* Use backend='te'"),
        ({"skip": ["*.0"]}, "convert and skip choose layers by name"),
        ({"num_layers_at_start_in_half": 1}, "Use bf16_with_fp8_current_scaling_mixed"),
    ],
)
def test_arguments_that_it_cannot_train_with(options, message):
    with pytest.raises(ValueError, match=message):
        _ = plugin_of("bf16_with_fp8_mixed", **options).dtype_config


# The plugin that stands in


class Inner(MegatronModule):
    """In the place of Megatron-core's GPTModel."""

    def __init__(self, config):
        super().__init__(config)
        self.linear = nn.Linear(4, 4)


class Chunk(pl.LightningModule):
    """In the place of NeMo's GPTModel, which has Megatron-core's inside."""

    def __init__(self, config):
        super().__init__()
        self.module = Inner(config)


def chunk_of(plugin):
    return Chunk(copied(plugin.dtype_config)[0])


def stand_in(name, **options):
    plugin = plugin_of(name, **options)
    return NemoPrecision(plugin.level, plugin.dtype_config)


def megatrons(**fields):
    """NeMo's wrapper of Megatron-core's optimizer, as far as the plugin looks at it."""
    return SimpleNamespace(mcore_optimizer=SimpleNamespace(config=OptimizerConfig(**fields), scale_loss="scale_loss"))


def test_it_takes_over_from_the_users_plugin():
    plugin = plugin_of("bf16_mixed")
    parallel = SimpleNamespace(precision_plugin=plugin, convert_module_fn=plugin.convert_module)
    strategy = SimpleNamespace(megatron_parallel=parallel, precision_plugin=plugin)
    chunk, later = chunk_of(plugin), chunk_of(plugin)
    chunk._trainer = SimpleNamespace(strategy=strategy)  # later chunks of a pipeline have none
    assert parallel.convert_module_fn(chunk) is chunk
    assert parallel.convert_module_fn(later) is later
    stands = strategy.precision_plugin
    assert type(stands) is NemoPrecision is type(parallel.precision_plugin)
    assert stands.dtype_config == plugin.dtype_config and stands.precision == "bf16_mixed"
    assert stands.state_dict() == {} and plugin.engine.model is None
    for converted in (chunk, later):
        assert isinstance(converted.module, Float16Module) and converted.module.bf16
        assert {p.dtype for p in converted.parameters()} == {torch.bfloat16}
    stands.teardown()
    assert strategy.precision_plugin is plugin


def test_a_chunk_is_wrapped_once():
    stands = stand_in("fp16_mixed")
    chunk = stands.convert_module(Chunk(copied(stands.dtype_config)[0]))
    wrapped = chunk.module
    assert wrapped.fp16 and stands.convert_module(chunk).module is wrapped


def test_no_strategy_of_lightning_or_ours_is_taken_for_nemos(monkeypatch):
    monkeypatch.setattr("nemo_lowprec.strategies.megatron.check_megatron", lambda: None)
    assert not runs(DDPStrategy()) and not runs(MegatronStrategy())


@pytest.mark.parametrize("name", [name for name in LEVELS if CHART[name].has_fp8])
def test_low_precision_gemms_need_transformer_engine(name, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformer_engine.pytorch", None)
    stands = stand_in(name)
    with pytest.raises(
        RuntimeError,
        match=rf"{name} needs Transformer Engine, .*--no-build-isolation 'transformer-engine\[",
    ):
        stands.convert_module(Chunk(copied(stands.dtype_config)[0]))


@pytest.mark.parametrize("name", ["fp16_mixed", "bf16_mixed"])
def test_the_loss_is_scaled_where_the_level_scales_it(name):
    stands = stand_in(name)
    chunks = [stands.convert_module(Chunk(copied(stands.dtype_config)[0])) for _ in range(2)]
    optimizer = megatrons(fp16=name == "fp16_mixed", bf16=name == "bf16_mixed")
    assert stands.convert_optimizer(optimizer) is optimizer
    scaled = "scale_loss" if name == "fp16_mixed" else None
    assert [chunk.module.config.grad_scale_func for chunk in chunks] == [scaled, scaled]


@pytest.mark.parametrize("optimizer", [torch.optim.Adam([torch.zeros(1)]), megatrons(), megatrons(fp16=True)])
def test_an_optimizer_without_masters_is_refused(optimizer):
    with pytest.raises(ValueError, match=r"bf16_mixed has FP32 masters .*Use NeMo's MegatronOptimizerModule"):
        stand_in("bf16_mixed").convert_optimizer(optimizer)


def test_one_of_several_optimizers_is_refused():
    parts = [megatrons(bf16=True).mcore_optimizer, megatrons().mcore_optimizer]
    chained = SimpleNamespace(mcore_optimizer=SimpleNamespace(chained_optimizers=parts))
    with pytest.raises(ValueError, match="FP32 masters"):
        stand_in("bf16_mixed").convert_optimizer(chained)


def test_clipping_is_the_optimizers():
    stands = stand_in("bf16_mixed")
    stands.clip_gradients(megatrons(bf16=True), None)
    with pytest.raises(ValueError, match=r"gradient_clip_val=1\.0: .*set clip_grad in OptimizerConfig"):
        stands.clip_gradients(megatrons(bf16=True), 1.0)


# How NeMo saves a plugin


@pytest.mark.parametrize("name", list(CHART))
def test_plugin_is_a_config_to_nemo(name):
    plugin = plugin_of(name, **SAME.get(name, {}))
    built = fdl.build(plugin.__io__)
    assert type(built) is LowPrecision and repr(built) == repr(plugin)
    assert not hasattr(LowPrecision, "__io__")  # NeMo leaves classes alone that have it


def test_plugin_survives_pickle_and_deepcopy():
    plugin = plugin_of("bf16_with_fp8_mixed", fp8_params=True)
    for again in (pickle.loads(pickle.dumps(plugin)), copy.deepcopy(plugin)):
        assert repr(again) == repr(plugin) and again.dtype_config == plugin.dtype_config

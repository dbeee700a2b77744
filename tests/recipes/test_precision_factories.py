"""Every level as a nemo_run factory."""

import inspect
import pickle

import fiddle as fdl
import nemo_run as run
import pytest
from lightning.pytorch import Trainer
from nemo_run.cli.cli_parser import ParseError, parse_cli_args
from nemo_run.core.serialization.yaml import YamlSerializer
from nemo_run.core.serialization.zlib_json import ZlibJSONSerializer

import nemo_lowprec
from nemo_lowprec import LowPrecision, recipes
from nemo_lowprec.chart import ALIASES, CHART
from nemo_lowprec.recipes import tiny


def override(*arguments: str) -> run.Config:
    """The plugin of the tiny recipe after a command line."""
    return parse_cli_args(tiny.pretrain_recipe(), list(arguments)).trainer.plugins


def test_there_is_a_factory_for_each_level_and_alias() -> None:
    assert list(recipes.FACTORIES) == [*CHART, *ALIASES]


@pytest.mark.parametrize("name", list(CHART))
def test_factory_makes_the_level(name: str) -> None:
    factory = getattr(recipes, name)
    config = factory()
    assert type(config) is run.Config and config.__fn_or_cls__ is getattr(nemo_lowprec, name)
    plugin = fdl.build(config)
    assert isinstance(plugin, LowPrecision) and plugin.level.name == name
    level = inspect.signature(getattr(nemo_lowprec, name)).parameters
    assert inspect.signature(factory).parameters == level


@pytest.mark.parametrize("name", list(ALIASES))
def test_factory_of_an_alias_makes_its_level_with_the_arguments(name: str) -> None:
    plugin = fdl.build(getattr(recipes, name)(num_layers_at_end_in_half=1))
    assert plugin.level is CHART[ALIASES[name].level] and plugin.parsed.layers.num_layers_at_end_in_half == 1
    assert plugin.options == {**ALIASES[name].options, "num_layers_at_end_in_half": 1}
    assert override(f"trainer.plugins={name}").__fn_or_cls__ is getattr(nemo_lowprec, name)


@pytest.mark.parametrize("factory", [recipes.lowprec_ddp, recipes.lowprec_sharded, recipes.lowprec_megatron])
def test_strategies_are_pickled_and_take_arguments_by_name(factory) -> None:
    assert pickle.loads(pickle.dumps(factory)) is factory
    with pytest.raises(TypeError):
        factory(True)


@pytest.mark.parametrize("name", list(CHART))
def test_config_survives_both_serializers(name: str) -> None:
    config = getattr(recipes, name)()
    if "fp8_margin" in inspect.signature(getattr(recipes, name)).parameters:
        config.fp8_margin = 3
    packed = ZlibJSONSerializer()
    assert packed.deserialize(packed.serialize(config)) == config
    text = YamlSerializer()
    assert f"_target_: nemo_lowprec.{name}\n" in text.serialize(config)
    assert text.deserialize(text.serialize(config)) == config


@pytest.mark.parametrize("name", list(CHART))
def test_level_is_found_on_the_command_line(name: str) -> None:
    assert override(f"trainer.plugins={name}") == getattr(recipes, name)()


def test_arguments_are_set_on_the_command_line() -> None:
    config = override(
        "trainer.plugins=fp16_with_fp8_mixed",
        "trainer.plugins.fp8_margin=1",
        "trainer.plugins.fp8=e4m3",
        "trainer.plugins.fp8_params=True",
        "trainer.plugins.override_linear_precision=(False,True,False)",
        "trainer.plugins.skip=['*.down_proj']",
        "trainer.plugins.convert=['*_proj']",
        "trainer.plugins.loss_scale=128.0",
    )
    plugin = fdl.build(config)
    assert plugin.options == {
        "fp8_margin": 1,
        "fp8": "e4m3",
        "fp8_params": True,
        "override_linear_precision": (False, True, False),
        "skip": ["*.down_proj"],
        "convert": ["*_proj"],
        "loss_scale": 128.0,
    }
    assert fdl.build(override("trainer.plugins=fp16_mixed", "trainer.plugins.loss_scale=None")).options == {
        "loss_scale": None
    }


@pytest.mark.parametrize(("text", "value"), [("auto", "auto"), ("None", None)])
def test_convert_takes_a_word_or_none(text: str, value: str | None) -> None:
    plugin = fdl.build(override("trainer.plugins=bf16_with_fp8_mixed", f"trainer.plugins.convert={text}"))
    assert plugin.options == {"convert": value}
    assert plugin.engine.options.layers.is_auto == (value == "auto")


def test_factory_takes_arguments_on_the_command_line() -> None:
    assert override("trainer.plugins=bf16_with_fp8_mixed(fp8_margin=2)").fp8_margin == 2


@pytest.mark.parametrize("value", ["3", "nothing", "{'a': 1}"])
def test_value_of_another_type_is_refused(value: str) -> None:
    with pytest.raises(ParseError):
        override(f"trainer.plugins.override_linear_precision={value}")


def test_unknown_argument_is_a_type_error() -> None:
    with pytest.raises(TypeError, match="fp8_margin"):
        recipes.fp16_mixed(fp8_margin=1)
    with pytest.raises((TypeError, AttributeError), match="fp8_margin"):
        recipes.fp16_mixed().fp8_margin = 1


def test_arguments_of_an_msamp_level_are_set_on_the_command_line() -> None:
    plugin = fdl.build(
        override(
            "trainer.plugins=msamp_o3",
            "trainer.plugins.half=fp16",
            "trainer.plugins.stochastic_rounding=True",
            "trainer.plugins.rounding_seed=7",
            "trainer.plugins.loss_scale=128.0",
        )
    )
    assert plugin.options == {"half": "fp16", "stochastic_rounding": True, "rounding_seed": 7, "loss_scale": 128.0}
    assert plugin.level.has_loss_scale
    assert fdl.build(override("trainer.plugins=msamp_o2", "trainer.plugins.gradient_release=True")).options == {
        "gradient_release": True
    }


def test_config_in_a_trainer_is_named() -> None:
    with pytest.raises(Exception, match=r"invalid type for plugin <Config\[fp16_mixed"):
        Trainer(plugins=recipes.fp16_mixed(), logger=False)

"""Megatron-Bridge's recipe names, wherever a level's name is taken."""

import inspect

import pytest
import torch
import yaml
from torch import nn

import nemo_lowprec
from nemo_lowprec.chart import ALIASES, CHART, NOT_SERVED, get_level, preset_of
from nemo_lowprec.chart.options import parse_options
from nemo_lowprec.cli import main
from nemo_lowprec.engine import Engine
from nemo_lowprec.loops import prepare
from nemo_lowprec.plugins import ALIASED, LowPrecision

DELAYED = "bf16_with_fp8_delayed_scaling_mixed"
NANO = "nanov2_bf16_with_fp8_current_scaling_mixed"


class Stack(nn.Module):
    """Six blocks of one linear layer, and a head."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Linear(32, 32) for _ in range(6))
        self.head = nn.Linear(32, 4)

    def forward(self, x):
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.head(x)


def layers_in_fp8(name, **options):
    model = Stack()
    prepare(model, None, name, backend="reference", convert=None, **options)
    engine = Engine.of(model)
    return sorted(engine.columns.computation.conversion.low), engine


def test_names_are_none_of_the_chart_and_stand_for_arguments_that_the_level_takes():
    assert not set(ALIASES) & set(CHART) and not set(NOT_SERVED) & (set(ALIASES) | set(CHART))
    for name, alias in ALIASES.items():
        given = parse_options(CHART[alias.level], preset_of(name)).given
        assert given == ", ".join(f"{k}={v!r}" for k, v in alias.options.items()), (
            f"a default of {alias.level} in {name}"
        )
    assert set(NOT_SERVED.values()) <= set(CHART)


@pytest.mark.parametrize("name", ALIASES)
def test_a_name_is_its_level_with_the_arguments(name):
    alias = ALIASES[name]
    assert get_level(name) is CHART[alias.level]
    function = getattr(nemo_lowprec, name)
    assert function is ALIASED[name] and function.__name__ == name and name in dir(nemo_lowprec)
    defaults = {n: p.default for n, p in inspect.signature(function).parameters.items()}
    assert alias.options.items() <= defaults.items()
    for plugin in (function(), LowPrecision(name)):
        assert plugin.level is CHART[alias.level] and plugin.options == dict(alias.options)
        assert plugin.parsed == LowPrecision(alias.level, **alias.options).parsed


def test_an_argument_of_the_caller_comes_before_that_of_the_name():
    plugin = getattr(nemo_lowprec, NANO)(num_layers_at_start_in_half=0)
    assert plugin.parsed.layers.num_layers_at_start_in_half == 0
    assert plugin.parsed.layers.num_layers_at_end_in_half == 2 and plugin.parsed.recipe.fp8 == "hybrid"
    with pytest.raises(TypeError, match="bf16_with_fp8_subchannel_scaling_mixed takes no 'fp8_params'"):
        LowPrecision(NANO, fp8_params=True)


def test_a_loop_keeps_the_first_and_last_blocks_in_half_precision():
    assert layers_in_fp8(NANO)[0] == ["blocks.2", "blocks.3"]
    assert layers_in_fp8(NANO, num_layers_at_end_in_half=0)[0] == ["blocks.2", "blocks.3", "blocks.4", "blocks.5"]


def test_a_loop_stores_weights_in_fp8():
    low, engine = layers_in_fp8(DELAYED)
    assert len(low) == 6 and engine.recipe.fp8_params
    assert type(engine.model.blocks[0].weight).__name__ == "Fp8Weight"


@pytest.mark.parametrize("name", NOT_SERVED)
@pytest.mark.parametrize("ask", [get_level, LowPrecision, lambda name: prepare(Stack(), None, name)])
def test_a_recipe_without_a_level_is_refused_with_the_nearest_one(name, ask):
    with pytest.raises(ValueError, match=f"^{name}, a recipe of .* nearest level is {NOT_SERVED[name]}.$"):
        ask(name)


def test_hydra_composes_the_level_with_the_arguments(capsys):
    assert main(["pretrain", f"precision={NANO}", "precision.num_layers_at_start_in_half=1", "--cfg", "job"]) == 0
    node = yaml.safe_load(capsys.readouterr().out)["precision"]
    assert node["_target_"] == "nemo_lowprec.bf16_with_fp8_subchannel_scaling_mixed"
    assert (node["fp8"], node["num_layers_at_start_in_half"], node["num_layers_at_end_in_half"]) == ("hybrid", 1, 2)


def test_the_command_line_refuses_a_recipe_without_a_level(capsys):
    assert main(["pretrain", "precision=fp16_with_mxfp8_mixed"]) == 2
    assert "nearest level is bf16_with_mxfp8_mixed" in capsys.readouterr().err


def test_the_levels_command_lists_the_names(capsys):
    assert main(["levels"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert all(name in printed for name in ALIASES)

"""Which layers are converted."""

import re

import pytest
import torch
from torch import nn

from nemo_lowprec.chart.groups import LayerFilter
from nemo_lowprec.chart.recipe import Recipe
from nemo_lowprec.compute import ReferenceBackend, convert_layers


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(32), nn.Linear(32, 64), nn.Linear(64, 32)


class Model(nn.Module):
    def __init__(self, blocks=4):
        super().__init__()
        self.inp = nn.Linear(32, 32)
        self.small = nn.ModuleList(nn.Identity() for _ in range(9))  # longest, but nothing to convert in it
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.lm_head = nn.Linear(32, 64)


def test_lists_of_names_are_those_of_tuples():
    assert LayerFilter(skip=[]) == LayerFilter() and LayerFilter(convert=["*"]) == LayerFilter("*")


def convert(model, **layers):
    recipe = Recipe("current")
    return convert_layers(model, torch.bfloat16, recipe, ReferenceBackend(), None, LayerFilter(**layers), None)


def low(model=None, **layers):
    result = convert(model or Model(), **layers)
    return set(result.low) | set(result.norms)


def block(*numbers, parts=("norm", "up", "down")):
    return {f"blocks.{n}.{part}" for n in numbers for part in parts}


EVERYTHING = {"inp", *block(0, 1, 2, 3)}


def test_everything_but_the_head_by_default():
    assert low() == EVERYTHING


@pytest.mark.parametrize(
    ("convert", "want"),
    [
        (["blocks.0.up"], {"blocks.0.up"}),
        ("blocks.0.up", {"blocks.0.up"}),
        (["blocks.1", "inp"], {"inp", *block(1)}),
        (["blocks.*.down"], block(0, 1, 2, 3, parts=["down"])),
        (["*.up", "lm_head"], {"lm_head", *block(0, 1, 2, 3, parts=["up"])}),
        (["blocks.[02]"], set()),
        (["blocks.[02].*"], block(0, 2)),
        ([], set()),
        (lambda name, module: isinstance(module, nn.Linear) and module.out_features == 64,
         {"lm_head", *block(0, 1, 2, 3, parts=["up"])}),
        (lambda name, module: name.startswith("blocks.3"), block(3)),
    ],
)  # fmt: skip
def test_convert_takes_names_globs_or_a_callable(convert, want):
    if convert == ["blocks.[02]"]:
        with pytest.raises(ValueError, match="matches no linear layer or norm"):
            low(convert=convert)
    else:
        assert low(convert=convert) == want


@pytest.mark.parametrize(
    ("skip", "gone"),
    [
        ("inp", {"inp"}),
        (["blocks.2"], block(2)),
        (["*.norm", "inp"], {"inp", *block(0, 1, 2, 3, parts=["norm"])}),
        ([], set()),
        (None, set()),
    ],
)
def test_skip_takes_names_and_globs(skip, gone):
    assert low(skip=skip) == EVERYTHING - gone


def test_skip_wins_over_convert():
    assert low(convert=["blocks.1", "lm_head"], skip=["*.up"]) == {"lm_head", *block(1, parts=["norm", "down"])}
    assert low(convert=lambda name, module: True, skip="lm_head") == EVERYTHING


def test_every_layer_that_is_left_has_its_reason():
    kept = convert(Model(), convert=["blocks"], skip=["blocks.3.up"], num_layers_at_start_in_half=1).kept
    assert kept == {
        "inp": "not in convert",
        "lm_head": "not in convert",
        "blocks.3.up": "in skip",
        **dict.fromkeys(block(0), "in the first layers kept in half precision"),
    }
    assert convert(Model(), convert=lambda n, m: n != "inp").kept == {"inp": "not chosen by convert"}


@pytest.mark.parametrize(
    ("start", "end", "left"),
    [(1, 0, [1, 2, 3]), (0, 1, [0, 1, 2]), (1, 2, [1]), (3, 3, []), (9, 0, []), (0, 9, [])],
)
def test_first_and_last_blocks_of_the_stack_stay_in_half(start, end, left):
    want = {"inp", *block(*left)}
    assert low(num_layers_at_start_in_half=start, num_layers_at_end_in_half=end) == want


def test_the_stack_is_the_list_with_most_layers_in_it_not_a_list_inside():
    class Experts(nn.Module):
        def __init__(self):
            super().__init__()
            self.experts = nn.ModuleList(nn.Linear(32, 32) for _ in range(5))

    model = nn.ModuleDict({"layers": nn.ModuleList(Experts() for _ in range(3))})
    assert low(model, num_layers_at_start_in_half=1) == {f"layers.{i}.experts.{j}" for i in (1, 2) for j in range(5)}


@pytest.mark.parametrize(
    ("start", "end", "left"), [(1, 0, "1 2 3"), (0, 1, "0 1 2"), (1, 1, "1 2"), (9, 0, ""), (0, 5, ""), (0, 3, "0")]
)
def test_first_and_last_layers_of_a_plain_sequential(start, end, left):
    model = nn.Sequential(*(nn.Linear(32, 32) for _ in range(4)))
    assert low(model, num_layers_at_start_in_half=start, num_layers_at_end_in_half=end) == set(left.split())


@pytest.mark.parametrize("name", ["lm_head", "head", "classifier", "score", "output_layer", "embed_out"])
def test_a_head_is_known_by_its_name_and_converted_by_naming_it(name):
    def model():
        return nn.ModuleDict({"body": nn.Linear(32, 32), "outer": nn.ModuleDict({name: nn.Linear(32, 64)})})

    result = convert(model())
    assert result.low == ["body"] and result.kept == {f"outer.{name}": "the head (head='fp8' converts it)"}
    assert convert(model(), convert=[f"outer.{name}"]).low == [f"outer.{name}"]
    assert convert(model(), convert=["body", "*"]).low == ["body", f"outer.{name}"]


@pytest.mark.parametrize(
    ("layers", "want"),
    [
        ({}, ["body", "outer.head"]), ({"convert": None}, ["body", "outer.head"]),
        ({"convert": ["body"]}, ["body", "outer.head"]), ({"convert": lambda name, module: False}, ["outer.head"]),
        ({"skip": ["outer"]}, ["body"]),
        ({"num_layers_at_end_in_half": 1}, ["body"]),
    ],
)  # fmt: skip
def test_a_head_in_fp8(layers, want):
    model = nn.ModuleDict({"body": nn.Linear(32, 32), "outer": nn.ModuleDict({"head": nn.Linear(32, 64)})})
    assert convert(model, head="fp8", **layers).low == want


def test_a_head_in_fp8_is_there_and_nothing_else_is_known():
    with pytest.raises(ValueError, match="head='fp8': no layer of Sequential is known as the head"):
        convert(nn.Sequential(nn.Linear(32, 32)), head="fp8")
    with pytest.raises(ValueError, match="head='fp4'"):
        LayerFilter(head="fp4")


@pytest.mark.parametrize("argument", ["convert", "skip"])
@pytest.mark.parametrize("pattern", ["block", "blocks.9", "*.missing", "small", ""])
def test_a_pattern_without_a_match_is_a_value_error_that_names_it(argument, pattern):
    message = re.escape(f"{pattern!r} matches no linear layer or norm") + ".*named_modules.*'inp'"
    with pytest.raises(ValueError, match=message):
        low(**{argument: [pattern]})


@pytest.mark.parametrize("argument", ["convert", "skip"])
@pytest.mark.parametrize("value", [5, [1, 2], [None], True, 0.5])
def test_a_value_that_holds_no_names_is_a_value_error_that_names_the_argument(argument, value):
    with pytest.raises(ValueError, match=f"^{argument}=.*must hold names or globs"):
        LayerFilter(**{argument: value})


def test_skip_takes_no_callable():
    with pytest.raises(ValueError, match=r"^skip=.*must hold names or globs"):
        LayerFilter(skip=lambda name, module: True)


@pytest.mark.parametrize("argument", ["num_layers_at_start_in_half", "num_layers_at_end_in_half"])
@pytest.mark.parametrize("value", [-1, 1.0, "1", True, None])
def test_a_bad_count_is_a_value_error_that_names_it(argument, value):
    with pytest.raises(ValueError, match=f"^{argument}=.*integer of at least 0"):
        LayerFilter(**{argument: value})


def test_a_model_without_layers_converts_nothing_and_a_pattern_says_so():
    assert low(nn.Sequential(nn.ReLU())) == set()
    with pytest.raises(ValueError, match=r"'x' matches no linear layer or norm.*none here"):
        low(nn.Sequential(nn.ReLU()), convert=["x"])

"""The FP8 recipe's arguments: bad values are named, good ones reach the operands."""

import pytest
import torch

from nemo_lowprec.chart import CHART
from nemo_lowprec.chart.recipe import Recipe
from nemo_lowprec.compute.operands import OPERANDS, new_histories, operand_of
from nemo_lowprec.formats import E4M3, E5M2
from nemo_lowprec.plugins import LEVELS
from nemo_lowprec.tensors import Fp8Weight


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("fp8", "e5m2"),
        ("fp8", "HYBRID"),
        ("fp8", None),
        ("fp8", True),
        ("fp8_amax_compute_algo", "min"),
        ("fp8_amax_compute_algo", None),
        ("fp8_margin", 0.5),
        ("fp8_margin", "1"),
        ("fp8_margin", None),
        ("fp8_margin", True),
        ("fp8_margin", -2),
        ("fp8_margin", 9),
        ("fp8_margin", 100),
        ("fp8_margin", -100),
        ("fp8_amax_history_len", 2**16 + 1),
        ("fp8_amax_history_len", 0),
        ("fp8_amax_history_len", -4),
        ("fp8_amax_history_len", 16.0),
        ("interval", 0),
        ("interval", False),
        ("interval", "2"),
        ("fast_accum", 1),
        ("fast_accum", "no"),
        ("fp8_params", 1),
        ("fp8_params", "true"),
        ("fp8_params", None),
        ("override_linear_precision", True),
        ("override_linear_precision", None),
        ("override_linear_precision", "TFF"),
        ("override_linear_precision", (True, False)),
        ("override_linear_precision", (True, False, False, False)),
        ("override_linear_precision", (1, 0, 0)),
        ("override_linear_precision", ("False", "False", "True")),
    ],
)
def test_a_bad_value_is_a_value_error_that_names_it(name, value):
    with pytest.raises(ValueError, match=f"^{name}="):
        Recipe("delayed", **{name: value})


@pytest.mark.parametrize("scaling", ["delayed", "current"])
@pytest.mark.parametrize("margin", [-1, 8])
@pytest.mark.parametrize("kind", OPERANDS)
def test_the_largest_margins_keep_most_of_a_tensor(scaling, margin, kind):
    operand = operand_of(Recipe(scaling, fp8_margin=margin), kind)
    values = torch.randn(512, 64, generator=torch.Generator().manual_seed(0))
    read = Fp8Weight.from_float(values, operand.fmt, torch.float32, operand.margin).dequantize()
    assert (read - values).norm() < 0.1 * values.norm()


@pytest.mark.parametrize("name", [name for name, level in CHART.items() if "fp8_margin" in Recipe.arguments(level)])
@pytest.mark.parametrize("margin", [-2, 9, 100, -100])
def test_every_level_refuses_a_margin_that_leaves_nothing(name, margin):
    with pytest.raises(ValueError, match=f"^fp8_margin={margin} must be an integer of at least -1 and at most 8"):
        LEVELS[name](fp8_margin=margin)


def test_mxfp8_refuses_hybrid_and_says_what_to_use():
    with pytest.raises(ValueError, match=r"fp8='hybrid' diverges with MXFP8.*Use fp8='e4m3'"):
        Recipe("mxfp8", fp8="hybrid")
    assert operand_of(Recipe("mxfp8", fp8="e4m3"), "grad_output").fmt is E4M3


def test_formats_of_the_operands():
    assert [operand_of(Recipe("delayed"), kind).fmt for kind in OPERANDS] == [E4M3, E4M3, E5M2]
    assert [operand_of(Recipe("delayed", fp8="e4m3"), kind).fmt for kind in OPERANDS] == [E4M3] * 3


def test_blocks_of_the_operands():
    sizes = {
        scaling: [
            (layout.rows, layout.cols) if layout else None
            for layout in (operand_of(Recipe(scaling, fp8="e4m3"), kind).layout for kind in OPERANDS)
        ]
        for scaling in ("delayed", "current", "rowwise", "blockwise", "mxfp8", "nvfp4")
    }
    assert sizes == {
        "delayed": [None] * 3,
        "current": [None] * 3,
        "rowwise": [(1, 0)] * 3,
        "blockwise": [(1, 128), (128, 128), (1, 128)],
        "mxfp8": [(1, 32)] * 3,
        "nvfp4": [(1, 16), (16, 16), (1, 16)],
    }


def test_only_delayed_scaling_keeps_histories_and_they_get_the_arguments():
    histories = Recipe("delayed", fp8_margin=1, fp8_amax_history_len=7, fp8_amax_compute_algo="most_recent", interval=3)
    table = new_histories(histories)
    assert (table.margin, table.history_len, table.algo, table.interval) == (1, 7, "most_recent", 3)
    assert all(
        new_histories(Recipe(s, fp8="e4m3")) is None for s in ("current", "rowwise", "blockwise", "mxfp8", "nvfp4")
    )


def test_flags_may_be_a_list_and_recipes_are_equal_by_value():
    a = Recipe("delayed", override_linear_precision=[True, False, False])
    assert a == Recipe("delayed", override_linear_precision=(True, False, False))
    assert hash(a) == hash(Recipe("delayed", override_linear_precision=(True, False, False)))


@pytest.mark.parametrize("name", [name for name, level in CHART.items() if level.has_fp8])
def test_defaults_of_every_level_make_a_recipe(name):
    level = CHART[name]
    extra = {} if "fp8" in Recipe.arguments(level) else {"fp8": "e4m3"}
    assert Recipe(level.scaling, **extra, **Recipe.arguments(level)).scaling == level.scaling


def test_levels_without_fp8_take_no_fp8_argument():
    assert Recipe.arguments(CHART["bf16_mixed"]) == {} == Recipe.arguments(CHART["fp16_amp"])

"""The chart: design and data say the same, and every level that can be asked for is there."""

from dataclasses import replace
from inspect import signature

import pytest

import nemo_lowprec
from nemo_lowprec.chart import CHART, COLUMNS, get_level
from nemo_lowprec.chart.groups import LayerFilter, LossScaleConfig, LowBitOptions
from nemo_lowprec.chart.options import parse_options
from nemo_lowprec.chart.recipe import Recipe

TABLE = """
| fp16_amp | FP16 | FP32 | FP32 | – | FP32 | FP32+FP32 |
| te_fp8 | FP8 | FP32 | FP32 | – | FP32 | FP32+FP32 |
| msamp_o1 | FP8 | FP8 | FP16 | – | FP8 | FP32+FP32 |
| msamp_o2 | FP8 | FP8 | FP16 | – | FP8 | FP8+FP16 |
| msamp_o3 | FP8 | FP8 | FP8 | FP16 | FP8 | FP8+FP16 |
| fp16_mixed | FP16 | FP16 | FP16 | FP32 | FP16 | FP32+FP32 |
| bf16_mixed | BF16 | FP32 | BF16 | FP32 | FP32 | FP32+FP32 |
| bf16_with_fp8_mixed | FP8 | FP32 | BF16, FP8 with fp8_params | FP32 | FP32 | FP32+FP32 |
| fp16_with_fp8_mixed | FP8 | FP16 | FP16, FP8 with fp8_params | FP32 | FP16 | FP32+FP32 |
| bf16_with_fp8_current_scaling_mixed | FP8 | FP32 | BF16, FP8 with fp8_params | FP32 | FP32 | FP32+FP32 |
| bf16_with_fp8_rowwise_mixed | FP8 | FP32 | BF16 | FP32 | FP32 | FP32+FP32 |
| bf16_with_fp8_subchannel_scaling_mixed | FP8 | FP32 | BF16 | FP32 | FP32 | FP32+FP32 |
| bf16_with_mxfp8_mixed | MXFP8 | FP32 | BF16 | FP32 | FP32 | FP32+FP32 |
| bf16_with_nvfp4_mixed | NVFP4 | FP32 | BF16 | FP32 | FP32 | FP32+FP32 |
"""
ROWS = [tuple(cell.strip() for cell in line.strip("|").split("|")) for line in TABLE.strip().splitlines()]
SCALING = {
    "te_fp8": "delayed",
    "msamp_o1": "delayed",
    "msamp_o2": "delayed",
    "msamp_o3": "delayed",
    "bf16_with_fp8_mixed": "delayed",
    "fp16_with_fp8_mixed": "delayed",
    "bf16_with_fp8_current_scaling_mixed": "current",
    "bf16_with_fp8_rowwise_mixed": "rowwise",
    "bf16_with_fp8_subchannel_scaling_mixed": "blockwise",
    "bf16_with_mxfp8_mixed": "mxfp8",
    "bf16_with_nvfp4_mixed": "nvfp4",
}
FP8_ARGUMENTS = {
    "delayed": {
        "fp8", "fp8_margin", "fp8_amax_history_len", "fp8_amax_compute_algo", "interval", "fast_accum",
        "override_linear_precision",
    },
    "current": {"fp8", "fp8_margin", "fast_accum", "override_linear_precision"},
    "rowwise": {"fp8", "fast_accum", "override_linear_precision"},
    "blockwise": {"fp8", "override_linear_precision"},
    "mxfp8": {"fp8", "override_linear_precision"},
    "nvfp4": {"override_linear_precision"},
}  # fmt: skip


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_row_is_the_designs(row):
    assert tuple(CHART[row[0]].columns().values()) == row


def test_chart_has_the_designs_rows_and_no_others():
    assert list(CHART) == [row[0] for row in ROWS]
    assert COLUMNS == (
        "Level", "Computation (GEMM)", "Comm", "Weight", "Master weight", "Weight gradient", "Optimizer states",
    )  # fmt: skip


@pytest.mark.parametrize("name", CHART)
def test_the_rest_of_the_row(name):
    level = CHART[name]
    half = "fp16" if name.startswith("fp16") else "bf16"
    msamp = name.startswith("msamp")
    assert level.name == name and level.autocast == half and level.summary
    assert level.rest == ("fp32" if name in ("fp16_amp", "te_fp8") else "fp16" if msamp else half)
    assert level.vectors == ("fp32" if msamp else None)
    assert level.scaling == SCALING.get(name) and level.has_fp8 == (name in SCALING)
    assert level.has_loss_scale == (half == "fp16")
    assert level.has_half_weights == (level.rest != "fp32")
    assert level.is_low_bit == level.half == msamp


@pytest.mark.parametrize("name", ["msamp_o1", "msamp_o2", "msamp_o3"])
def test_the_half_format_of_an_msamp_level_is_chosen(name):
    level, other = CHART[name], getattr(nemo_lowprec, name)(half="fp16").level
    assert other.autocast == "fp16" and other.has_loss_scale and other.columns() == level.columns()
    assert getattr(nemo_lowprec, name)(half="bf16").level is level
    for half in ("fp32", "float16", None, True):
        with pytest.raises(ValueError, match=f"half={half!r} must be 'bf16' or 'fp16'"):
            getattr(nemo_lowprec, name)(half=half)


@pytest.mark.parametrize("name", ["bf16", "BF16_MIXED", "", None, 16])
def test_an_unknown_level_is_a_value_error_that_lists_the_levels(name):
    with pytest.raises(ValueError, match=r"Unknown precision level .*fp16_amp, te_fp8.*bf16_with_nvfp4_mixed"):
        get_level(name)


@pytest.mark.parametrize("name", CHART)
def test_a_row_of_the_chart_is_valid(name):
    assert CHART[name].validate() is CHART[name]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"compute": "int8"}, "compute='int8' of the row 'mine' must be one of: fp16, bf16, fp8, mxfp8, nvfp4."),
        ({"comm": "fp6"}, "comm='fp6' .* must be one of: fp32, fp16, bf16, fp8."),
        ({"weight": "mxfp8"}, "weight='mxfp8' "),
        ({"weight": ("fp8", "fp16")}, r"weight=\('fp8', 'fp16'\) "),
        ({"weight": None}, "weight=None "),
        ({"master_weight": "FP32"}, "master_weight='FP32' .* must be one of: None, fp32,"),
        ({"weight_grad": "e5m2"}, "weight_grad='e5m2' "),
        ({"optimizer_states": ("fp8", "int8")}, r"optimizer_states=\('fp8', 'int8'\) .* must be one of: fp32,"),
        ({"optimizer_states": ("fp8",)}, r"optimizer_states=\('fp8',\) must be two formats"),
        ({"rest": "fp64"}, "rest='fp64' "),
        ({"vectors": "fp64"}, "vectors='fp64' "),
        ({"autocast": "fp32"}, "autocast='fp32' of the row 'mine' must be one of: bf16, fp16."),
        ({"scaling": "column"}, "scaling='column' .* delayed, current, rowwise, blockwise with compute='fp8'"),
        ({"scaling": None}, "scaling=None .* with compute='fp8'"),
        ({"compute": "bf16"}, "scaling='delayed' of the row 'mine' must be one of: None with compute='bf16'"),
    ],
)
def test_a_value_that_a_column_does_not_have_is_a_value_error_that_names_the_column(changed, message):
    row = replace(CHART["bf16_with_fp8_mixed"], name="mine", **changed)
    with pytest.raises(ValueError, match=message):
        row.validate()
    with pytest.raises(ValueError, match=message):
        parse_options(row, {})


def expected_arguments(level):
    arguments = {}
    if level.scaling:
        arguments |= {name: Recipe.arguments(level)[name] for name in FP8_ARGUMENTS[level.scaling]}
        if level.fp8_params:
            arguments["fp8_params"] = False
        arguments |= {"backend": "auto", "attention": "auto", "weight_cache": "auto", "activations": None}
        if level.scaling in ("delayed", "current"):
            arguments["frozen"] = "auto"
        arguments |= LayerFilter.arguments()
    if level.name.startswith("msamp"):
        arguments |= {"half": "bf16"} | LowBitOptions.arguments() | LossScaleConfig.arguments()
    elif level.has_loss_scale:
        arguments |= LossScaleConfig.arguments()
    if level.name in ("msamp_o2", "msamp_o3"):
        arguments["states"] = "fp8+fp16"
    return arguments | {"graphs": "auto"}


@pytest.mark.parametrize("name", list(CHART))
def test_every_level_is_a_function_of_the_package_with_its_rows_arguments(name):
    build = getattr(nemo_lowprec, name)
    parameters = signature(build).parameters
    assert {n: p.default for n, p in parameters.items()} == expected_arguments(CHART[name])
    assert build.__name__ == name and build.__module__ == "nemo_lowprec"
    assert all(f"{argument}: " in build.__doc__ for argument in parameters)
    assert build().level is CHART[name]


@pytest.mark.parametrize("name", list(CHART))
def test_an_argument_that_a_level_does_not_take_is_a_type_error_that_names_it(name):
    for argument in ("no_such_thing", "fp8_margin", "hysteresis", "fp8_params"):
        if argument not in expected_arguments(CHART[name]):
            with pytest.raises(TypeError, match=f"{name} .*'{argument}'"):
                getattr(nemo_lowprec, name)(**{argument: 1})


def test_levels_are_in_dir_and_others_are_attribute_errors():
    assert set(CHART) <= set(dir(nemo_lowprec))
    with pytest.raises(AttributeError, match="no_such_level"):
        nemo_lowprec.no_such_level()

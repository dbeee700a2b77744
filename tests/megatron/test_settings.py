"""What each row of the chart becomes in Megatron-core's three configs."""

import pickle
from dataclasses import FrozenInstanceError, fields

import pytest
import torch
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.enums import AttnBackend
from torch import nn

from nemo_lowprec.chart import CHART, get_level
from nemo_lowprec.chart.options import parse_options
from nemo_lowprec.megatron import ParallelLayout, resolve
from nemo_lowprec.megatron.columns import convert
from nemo_lowprec.megatron.summary import layers_table, settings_table
from nemo_lowprec.observers import NOBODY
from tests.support import level_of

# params: dtype of matrices, and of the model's config; vectors: of parameters of fewer dimensions; half: which of the
# config's fp16 and bf16 is set; autocast: of the forward pass, - for none; master: of the layers' weights, - for none;
# main: OptimizerConfig's main_params_dtype; grads: the format of gradients in Megatron's buffers, and on the wire.
TABLE = """
| level                                  | params | vectors | half | autocast | gemm   | recipe     | fp8_w | master | main | grads | moments   | scaled |
| fp16_amp                               | fp32   | fp32    | -    | fp16     | -      | -          | no    | -      | fp32 | fp32  | fp32 fp32 | yes    |
| te_fp8                                 | fp32   | fp32    | -    | bf16     | hybrid | delayed    | no    | -      | fp32 | fp32  | fp32 fp32 | no     |
| msamp_o1+fp16                          | fp16   | fp32    | fp16 | fp16     | hybrid | delayed    | no    | -      | fp16 | fp8   | fp32 fp32 | yes    |
| msamp_o2+fp16                          | fp16   | fp32    | fp16 | fp16     | hybrid | delayed    | no    | -      | fp16 | fp8   | fp8 fp16  | yes    |
| msamp_o3+fp16                          | fp16   | fp32    | fp16 | fp16     | hybrid | delayed    | yes   | fp16   | fp16 | fp8   | fp8 fp16  | yes    |
| fp16_mixed                             | fp16   | fp16    | fp16 | -        | -      | -          | no    | fp32   | fp32 | fp16  | fp32 fp32 | yes    |
| bf16_mixed                             | bf16   | bf16    | bf16 | -        | -      | -          | no    | fp32   | fp32 | fp32  | fp32 fp32 | no     |
| bf16_with_fp8_mixed                    | bf16   | bf16    | bf16 | -        | hybrid | delayed    | no    | fp32   | fp32 | fp32  | fp32 fp32 | no     |
| fp16_with_fp8_mixed                    | fp16   | fp16    | fp16 | -        | hybrid | delayed    | no    | fp32   | fp32 | fp16  | fp32 fp32 | yes    |
| bf16_with_fp8_current_scaling_mixed    | bf16   | bf16    | bf16 | -        | hybrid | tensorwise | no    | fp32   | fp32 | fp32  | fp32 fp32 | no     |
| bf16_with_fp8_subchannel_scaling_mixed | bf16   | bf16    | bf16 | -        | e4m3   | blockwise  | no    | fp32   | fp32 | fp32  | fp32 fp32 | no     |
| bf16_with_mxfp8_mixed                  | bf16   | bf16    | bf16 | -        | e4m3   | mxfp8      | no    | fp32   | fp32 | fp32  | fp32 fp32 | no     |
| bf16_with_nvfp4_mixed                  | bf16   | bf16    | bf16 | -        | e2m1   | nvfp4      | no    | fp32   | fp32 | fp32  | fp32 fp32 | no     |
"""  # noqa: E501
HEAD, *ROWS = [[cell.strip() for cell in line.strip("|").split("|")] for line in TABLE.strip().splitlines()]
EXPECTED = {row[0]: dict(zip(HEAD, row, strict=True)) for row in ROWS}
STORED = [name for name, level in CHART.items() if level.fp8_params]
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16, "fp8": torch.uint8, "-": None}


def settings_of(case, own_layers=False, **options):
    name, _, variant = case.partition("+")
    options |= {"half": variant} if variant else {}
    return resolve(parse_options(get_level(name), options), own_layers)


def test_every_row_of_the_chart_is_in_the_table():
    levels = [name for name, level in CHART.items() if level.scaling != "rowwise"]
    assert [case.partition("+")[0] for case in EXPECTED] == levels


@pytest.mark.parametrize("case", EXPECTED)
def test_row_becomes_the_tables_settings(case):
    settings, row = settings_of(case), EXPECTED[case]
    model, optimizer, ddp = settings.model, settings.optimizer, settings.ddp
    params, half = DTYPES[row["params"]], DTYPES[level_of(case).autocast]
    assert settings.level == level_of(case)
    assert model["params_dtype"] == optimizer["params_dtype"] == settings.matrices == params
    assert settings.vectors == DTYPES[row["vectors"]]
    assert {name for name in ("fp16", "bf16") if model[name]} == {row["half"]} - {"-"}
    assert (model["enable_autocast"], model["autocast_dtype"]) == (row["autocast"] != "-", half)
    assert model["pipeline_dtype"] == (half if row["half"] != "-" else torch.float32)
    if row["gemm"] == "e2m1":
        assert (model["fp4"], model["fp4_recipe"], model["fp8"]) == ("e2m1", row["recipe"], None)
    else:
        assert (model["fp4"], model["fp8"] or "-") == (None, row["gemm"])
        assert not model["fp8"] or model["fp8_recipe"] == optimizer["fp8_recipe"] == row["recipe"]
        assert not model["fp8"] or model["fp8_wgrad"] is True
    assert optimizer["fp8_recipe"] == (model["fp8_recipe"] if model["fp8"] else None)
    assert settings.fp8_weights == model["fp8_param"] == ddp["fp8_param_gather"] == (row["fp8_w"] == "yes")
    assert settings.master_weight == DTYPES[row["master"]]
    assert optimizer["main_params_dtype"] == DTYPES[row["main"]]
    assert optimizer["main_grads_dtype"] == torch.float32
    assert ddp["grad_reduce_in_fp32"] == (row["grads"] == "fp32")
    assert settings.fp8_gradients == ddp["pad_buckets_for_high_nccl_busbw"] == (row["grads"] == "fp8")
    moments = tuple(DTYPES[moment] for moment in row["moments"].split())
    assert (optimizer["exp_avg_dtype"], optimizer["exp_avg_sq_dtype"]) == moments
    assert optimizer["use_precision_aware_optimizer"] == (row["grads"] == "fp8")
    assert optimizer["fp16"] == ("initial_loss_scale" in optimizer) == (row["scaled"] == "yes")
    assert optimizer["bf16"] == (row["half"] == "bf16")
    assert optimizer["use_distributed_optimizer"] and ddp["use_distributed_optimizer"]
    assert ddp["average_in_collective"]


def test_rowwise_scaling_is_for_the_layers_of_this_package_alone():
    with pytest.raises(ValueError, match=r"no rowwise scaling. Use bf16_with_fp8_current_scaling_mixed or"):
        settings_of("bf16_with_fp8_rowwise_mixed")
    own, plain = (settings_of(name, own_layers=True) for name in ("bf16_with_fp8_rowwise_mixed", "bf16_mixed"))
    assert (own.model, own.optimizer, own.ddp) == (plain.model, plain.optimizer, plain.ddp)


@pytest.mark.parametrize("name", STORED)
def test_fp8_params_are_stored_and_gathered_in_fp8_and_change_nothing_else(name):
    stored, plain = settings_of(name, fp8_params=True), settings_of(name)
    assert stored.fp8_weights and stored.model["fp8_param"] and stored.ddp["fp8_param_gather"]
    assert stored.model == {**plain.model, "fp8_param": True}
    assert stored.ddp == {**plain.ddp, "fp8_param_gather": True}
    assert (stored.optimizer, stored.matrices, stored.master_weight) == (
        plain.optimizer, plain.matrices, plain.master_weight,
    )  # fmt: skip


@pytest.mark.parametrize("case", [case for case in EXPECTED if not case.startswith("msamp_o3")])
def test_of_own_layers_megatron_is_told_no_low_precision(case):
    own, built = settings_of(case, own_layers=True), settings_of(case)
    assert (own.model["fp8"], own.model["fp4"], own.model["fp8_param"]) == (None, None, False)
    assert own.model.items() <= {**built.model, "fp8": None, "fp8_recipe": "delayed", "fp4": None}.items()
    assert own.optimizer == {**built.optimizer, "fp8_recipe": None} and own.ddp == built.ddp
    assert (own.matrices, own.vectors, own.master_weight) == (built.matrices, built.vectors, built.master_weight)


@pytest.mark.parametrize("case", [*EXPECTED, *(f"{name}/fp8_params" for name in STORED)])
def test_megatron_core_takes_them(case):
    name, _, stored = case.partition("/")
    settings = settings_of(name, **({"fp8_params": True} if stored else {}))
    layout = ParallelLayout(tensor=2, pipeline=2, virtual_pipeline=2, context=2, sequence_parallel=True)
    sizes = {"num_layers": 8, "hidden_size": 64, "num_attention_heads": 4}
    model = TransformerConfig(**sizes, **layout.fields(), **settings.model)
    assert (model.params_dtype, model.fp8, model.tensor_model_parallel_size) == (
        settings.matrices, settings.model["fp8"], 2,
    )  # fmt: skip
    ddp = DistributedDataParallelConfig(**settings.ddp)
    assert ddp.grad_reduce_in_fp32 == settings.ddp["grad_reduce_in_fp32"]
    if settings.optimizer["use_precision_aware_optimizer"]:  # asks for Transformer Engine
        assert settings.optimizer.keys() <= {field.name for field in fields(OptimizerConfig)}
    else:
        assert OptimizerConfig(**settings.optimizer).exp_avg_dtype == torch.float32


def test_arguments_of_the_level_become_fields():
    model = settings_of(
        "bf16_with_fp8_mixed",
        fp8="e4m3",
        fp8_margin=2,
        fp8_amax_history_len=16,
        fp8_amax_compute_algo="most_recent",
        attention="cudnn",
        backend="te",
    ).model
    assert (model["fp8"], model["fp8_margin"]) == ("e4m3", 2)
    assert (model["fp8_amax_history_len"], model["fp8_amax_compute_algo"]) == (16, "most_recent")
    assert AttnBackend[model["attention_backend"]] is AttnBackend.fused
    assert AttnBackend[settings_of("te_fp8").model["attention_backend"]] is AttnBackend.auto
    assert "first_last_layers_bf16" not in model


def test_blocks_in_half_precision_become_fields():
    name = "bf16_with_fp8_current_scaling_mixed"
    model = settings_of(name, num_layers_at_start_in_half=1).model
    assert model["first_last_layers_bf16"]
    assert (model["num_layers_at_start_in_bf16"], model["num_layers_at_end_in_bf16"]) == (1, 0)
    model = settings_of(name, num_layers_at_end_in_half=2).model
    assert (model["num_layers_at_start_in_bf16"], model["num_layers_at_end_in_bf16"]) == (0, 2)


@pytest.mark.parametrize("case", [case for case, row in EXPECTED.items() if row["scaled"] == "yes"])
def test_loss_scaling_becomes_fields(case):
    given = {"initial_loss_scale": 256.0, "min_loss_scale": 0.5, "loss_scale_window": 10, "hysteresis": 3}
    optimizer = settings_of(case, **given).optimizer
    assert {name: optimizer[name] for name in given} == given and optimizer["loss_scale"] is None
    assert settings_of(case, loss_scale=128.0).optimizer["loss_scale"] == 128.0


def test_stochastic_rounding_is_kept_for_the_optimizer():
    settings = settings_of("msamp_o2+fp16", stochastic_rounding=True, rounding_seed=7)
    assert (settings.options.low_bit.stochastic_rounding, settings.options.low_bit.rounding_seed) == (True, 7)
    assert not settings_of("msamp_o2+fp16").options.low_bit.stochastic_rounding


@pytest.mark.parametrize("case", EXPECTED)
def test_settings_are_frozen_and_pickled(case):
    settings = settings_of(case)
    with pytest.raises(FrozenInstanceError):
        settings.matrices = torch.float64
    for part in ("model", "optimizer", "ddp"):
        with pytest.raises(TypeError):
            getattr(settings, part)["fp16"] = None
    again = pickle.loads(pickle.dumps(settings))
    assert again == settings
    with pytest.raises(TypeError):
        again.model["fp16"] = None


HALF_LAYERS = {"num_layers_at_start_in_half": 1}
REFUSED = [
    ("msamp_o1", {}, "msamp_o1 keeps FP16 weights.*Use msamp_o1.half='fp16'., or strategy='lowprec_sharded'"),
    ("msamp_o3", {}, "msamp_o3 keeps FP16 weights"),
    ("bf16_with_fp8_mixed", {"backend": "torch"}, "backend='torch'.*Use backend='te'"),
    ("te_fp8", {"backend": "reference"}, "backend='reference'.*Use backend='te'"),
    ("bf16_with_fp8_mixed", {"interval": 4}, "interval=4.*Use interval=1"),
    ("te_fp8", {"fast_accum": True}, "fast_accum=True.*Leave it out, or use strategy='lowprec_sharded'"),
    (
        "bf16_with_fp8_mixed",
        {"override_linear_precision": (False, False, True)},
        "override_linear_precision=.False, False, True.*Leave it out, or use strategy='lowprec_sharded'",
    ),
    ("bf16_with_fp8_current_scaling_mixed", {"fp8_margin": 1}, "fp8_margin=1.*current scaling.*Leave it out"),
    ("msamp_o2+fp16", {"activations": "fp8"}, "activations='fp8'.*Leave it out, and set recompute_granularity"),
    (
        "bf16_with_fp8_mixed",
        {"head": "fp8"},
        "head='fp8': Megatron-core computes its output layer in half.*out",
    ),
    ("bf16_with_fp8_mixed", {"convert": ["*.q_proj"]}, "convert and skip choose layers by name.*Leave them out"),
    ("bf16_with_mxfp8_mixed", {"skip": ["*.q_proj"]}, "convert and skip choose layers by name.*Leave them out"),
    ("te_fp8", HALF_LAYERS, "te_fp8 scales by amaxes.*Use bf16_with_fp8_current_scaling_mixed, or leave num_layers"),
    ("te_fp8", {"weight_cache": False}, "weight_cache=False: Transformer Engine's layers.*Leave it out"),
    ("bf16_mixed", {"graphs": True}, "graphs=True: no block is captured under Megatron-core. Leave it out"),
    ("te_fp8", {"frozen": "fp8"}, "frozen='fp8': Megatron-core's frozen weights are stored as its.*Leave it out"),
    ("bf16_with_nvfp4_mixed", HALF_LAYERS, "not at bf16_with_nvfp4_mixed. Leave num_layers_at_start_in_half"),
]
REFUSED_OF_OWN_LAYERS = [
    ("msamp_o2", {}, "Use msamp_o2.half='fp16'."),
    ("msamp_o3+fp16", {}, "msamp_o3 stores weights in FP8.*Use msamp_o2, a GPTModel, or strategy='lowprec_sharded'"),
    ("te_fp8", {"graphs": True}, "graphs=True: no block is captured under Megatron-core. Leave it out"),
    ("msamp_o2+fp16", {"frozen": "fp8"}, "frozen='fp8': Megatron-core's frozen weights are stored as its.*Leave it"),
    ("bf16_with_fp8_mixed", {"fp8_params": True}, "Use bf16_with_fp8_mixed without fp8_params, a GPTModel, or"),
]


@pytest.mark.parametrize(("case", "options", "message"), REFUSED)
def test_what_megatrons_layers_cannot_do_is_refused(case, options, message):
    with pytest.raises(ValueError, match=message):
        settings_of(case, **options)


@pytest.mark.parametrize(("case", "options", "message"), REFUSED_OF_OWN_LAYERS)
def test_what_own_layers_cannot_do_is_refused(case, options, message):
    with pytest.raises(ValueError, match=message):
        settings_of(case, own_layers=True, **options)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("bf16_with_fp8_mixed", {"backend": "reference"}),
        ("bf16_with_fp8_mixed", {"interval": 4}),
        ("bf16_with_fp8_mixed", {"fast_accum": True}),
        ("bf16_with_fp8_mixed", {"activations": "fp8"}),
        ("bf16_with_fp8_mixed", {"override_linear_precision": (False, False, True)}),
        ("bf16_with_fp8_mixed", {"skip": ["*.q_proj"]}),
        ("te_fp8", HALF_LAYERS),
        ("bf16_with_fp8_current_scaling_mixed", {"fp8_margin": 1}),
    ],
)
def test_own_layers_take_what_megatrons_cannot(name, options):
    assert settings_of(name, own_layers=True, **options).model["fp8"] is None


def test_the_table_shows_the_fields_in_80_columns():
    settings = settings_of("bf16_with_fp8_mixed", fp8_params=True)
    layout = ParallelLayout(tensor=2, pipeline=4, virtual_pipeline=5, sequence_parallel=True)
    text = settings_table(settings, layout, {"overlap_param_gather": False})
    assert max(map(len, text.splitlines())) <= 80
    lines = [line.split() for line in text.splitlines()]
    shown = dict(words for words in lines if len(words) == 2)
    assert {**settings.model, **settings.optimizer, **settings.ddp}.keys() <= shown.keys()
    assert (shown["fp8_recipe"], shown["params_dtype"], shown["fp8_param_gather"]) == ("delayed", "bfloat16", "True")
    assert (shown["tensor_model_parallel_size"], shown["virtual_pipeline_model_parallel_size"]) == ("2", "5")
    assert (shown["sequence_parallel"], shown["overlap_p2p_comm"]) == ("True", "True")
    assert "context_parallel_size" not in shown  # one process, as without it
    assert shown["overlap_param_gather"] == "False"
    configs = [words[0] for words in lines if words[1:] == ["of", "Megatron-core"]]
    assert configs == ["TransformerConfig", "OptimizerConfig", "DistributedDataParallelConfig"]


@pytest.mark.parametrize("case", ["bf16_with_fp8_mixed", "te_fp8", "bf16_mixed"])
def test_layers_and_matrices_are_shown_and_too_little_is_warned_of(case):
    options = parse_options(get_level(case), {"backend": "reference"} if case != "bf16_mixed" else {})
    settings = resolve(options, own_layers=True)
    module = nn.ModuleDict({"up": nn.Linear(32, 32), "lstm": nn.LSTM(32, 64)})
    own = convert(module, settings, torch.device("cpu"), NOBODY).computation
    table, problem = layers_table([module], settings, own)
    if case == "bf16_mixed":
        assert (table, problem) == (None, None)
        return
    assert "FP8 (delayed," in table and "*.weight_hh_l0" in table
    assert problem.startswith(f"{case}: only 4% of the FLOP")
    own.remove()


def test_parts_that_megatron_core_has_built_are_looked_at_together():
    """Without Transformer Engine here: its layers would count as converted."""
    options = parse_options(get_level("bf16_with_fp8_current_scaling_mixed"), {"num_layers_at_start_in_half": 1})
    settings = resolve(options)
    parts = [nn.ModuleDict({"layer": nn.Bilinear(4, 4, 4)}) for _ in range(2)]
    table, problem = layers_table(parts, settings, None)
    text = " ".join(table.split())
    assert "*.layer.weight" in text and "100.0 %" in text and "first 1 and" in text
    assert "no matrix" in problem

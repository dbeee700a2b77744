"""``advise``: errors of operands, layers to keep back, expected times, and a model that stays as it was."""

import copy
from dataclasses import replace

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import nemo_lowprec
from nemo_lowprec.chart.recipe import Recipe
from nemo_lowprec.compute.backends.base import Orientation
from nemo_lowprec.compute.backends.reference import ReferenceBackend
from nemo_lowprec.compute.gemm_times import STORED
from nemo_lowprec.compute.operands import operand_of
from nemo_lowprec.engine import Engine
from nemo_lowprec.formats import BlockScaledMatrix, dequantize_blocks
from nemo_lowprec.lines import bytes_text
from nemo_lowprec.models import CausalLM
from nemo_lowprec.plugins import LowPrecision
from nemo_lowprec.report import advise, plan_training
from nemo_lowprec.report.advice import operands
from nemo_lowprec.report.advice.layers import kept_back
from nemo_lowprec.report.advice.measuring import MeasuredStep, measure_level
from nemo_lowprec.report.advice.operands import SCALINGS, OperandErrors, Rounded, way_of
from nemo_lowprec.report.advice.passes import half_copy, look
from nemo_lowprec.report.advice.paste import patterns_of
from nemo_lowprec.report.advice.times import StepTimes
from nemo_lowprec.report.bounds import MIN_SQNR
from tests.auto import MADE_UP, made_up_times

CPU = torch.device("cpu")
RECIPES = {s: Recipe(s) if s in ("delayed", "current") else Recipe(s, fp8="e4m3") for s in SCALINGS}


class Net(nn.Module):
    """Linear layers, dropout and a buffer that each forward pass writes; returns the loss."""

    def __init__(self, spoiled=None):
        super().__init__()
        self.first, self.second, self.head = nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 16)
        self.norm, self.dropout = nn.BatchNorm1d(64), nn.Dropout(0.5)
        if spoiled is not None:
            with torch.no_grad():
                getattr(self, spoiled).weight[3, 5] = 3e4

    def forward(self, x, y):
        x = self.norm(self.first(x).relu())
        return F.cross_entropy(self.head(self.dropout(self.second(x).relu())), y)


def batch_of(rows=64):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(rows, 64, generator=generator), torch.randint(16, (rows,), generator=generator)


def seen(model=None, batch=None):
    torch.manual_seed(0)
    return look(half_copy(Net() if model is None else model, CPU), batch or batch_of(), RECIPES)


def state_of(model):
    return copy.deepcopy({**dict(model.named_parameters()), **dict(model.named_buffers())})


def test_nothing_of_the_model_changes():
    torch.manual_seed(0)
    model, batch = Net(), batch_of()
    model.second.eval()
    model(*batch).backward()
    before, modes = state_of(model), {name: m.training for name, m in model.named_modules()}
    grads = {name: p.grad for name, p in model.named_parameters()}
    values = {name: grad.clone() for name, grad in grads.items()}
    rng, storage = torch.get_rng_state(), {name: p.data_ptr() for name, p in model.named_parameters()}
    classes = [type(m) for m in model.modules()]
    with made_up_times():  # so that times are measured, too
        found = advise(model, batch, ["bf16_mixed", "bf16_with_fp8_mixed", "msamp_o2"])
    assert all(level.ms is not None for level in found.levels)
    assert torch.equal(torch.get_rng_state(), rng)
    assert all(torch.equal(t, before[name]) for name, t in state_of(model).items())
    assert {name: p.data_ptr() for name, p in model.named_parameters()} == storage
    for name, param in model.named_parameters():
        assert param.grad is grads[name] and torch.equal(param.grad, values[name])
    assert {name: m.training for name, m in model.named_modules()} == modes
    assert [type(m) for m in model.modules()] == classes and Engine.of(model) is None
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_each_operand_of_each_converted_layer_is_looked_at_in_each_way():
    found = seen()
    assert found.layers == ["first", "second"]  # the head stays in half precision
    kinds = ("input", "weight", "grad_output")
    assert set(found.errors) == {Rounded(x, kind, way) for x in found.layers for kind in kinds for way in SCALINGS}
    assert found.errors[Rounded("first", "weight", "current")].count == 64 * 64
    assert found.errors[Rounded("first", "input", "blockwise")].count == 2 * 64 * 64  # both orientations
    assert found.errors[Rounded("first", "input", "delayed")].count == 8 * 64  # the last eighth of 64 rows


@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("kind", ["input", "weight", "grad_output"])
def test_values_are_rounded_as_the_reference_backend_rounds_them(scaling, kind):
    values = torch.randn(256, 160, generator=torch.Generator().manual_seed(2)) * 1e-3
    values[0, 7] = 1.0
    recipe = RECIPES[scaling]
    errors = OperandErrors(RECIPES, ["layer"])
    errors.quantized("layer", kind, values, None, None)
    quantized = ReferenceBackend().quantize(
        values, operand_of(recipe, kind), rowwise=True, columnwise=True, record=False
    )

    def read(part: Orientation):
        if part.layout is None:
            return part.data.float() * part.scale_inv
        return dequantize_blocks(BlockScaledMatrix(part.data, part.scale_inv, part.layout))

    parts = [read(quantized.rowwise), read(quantized.columnwise).t()] if scaling in ("rowwise", "blockwise") else [
        read(quantized.rowwise)
    ]  # fmt: skip
    rows = slice(224, None) if scaling == "delayed" and kind != "weight" else slice(None)
    noise = sum((part[rows] - values[rows]).double().square().sum() for part in parts)
    signal = len(parts) * values[rows].double().square().sum()
    found = errors.read()[Rounded("layer", kind, scaling)]
    assert found.sqnr == pytest.approx(10 * torch.log10(signal / noise).item(), abs=1e-3)
    zeros = sum(((part[rows] == 0) & (values[rows] != 0)).sum().item() for part in parts)
    assert found.underflow == pytest.approx(100 * zeros / (len(parts) * (values[rows] != 0).sum().item()))


def test_delayed_scaling_clips_what_its_history_has_not_seen():
    values = torch.ones(64, 32)
    values[56:] = 4.0
    errors = OperandErrors(RECIPES | {"delayed, margin 2": Recipe("delayed", fp8_margin=2)}, ["layer"])
    errors.quantized("layer", "input", values, None, None)
    found = errors.read()
    assert found[Rounded("layer", "input", "delayed")].saturation == 100.0
    assert found[Rounded("layer", "input", "delayed, margin 2")].saturation == 0.0
    assert found[Rounded("layer", "input", "current")].saturation == 0.0


def test_ways_of_scaling_have_their_options_in_their_names():
    assert [way_of(recipe) for recipe in RECIPES.values()] == list(SCALINGS)
    assert way_of(Recipe("current", fp8="e4m3", fp8_margin=1)) == "current, margin 1, e4m3"


def test_a_layer_with_an_outlier_in_its_weight_is_kept_back():
    assert not kept_back(seen().errors, "current")
    found = kept_back(seen(Net(spoiled="second")).errors, "current")
    assert [one.layer for one in found][-1] == "second"
    assert "weight: underflow" in found[-1].reason and found[-1].beyond > 1


def test_a_new_llama_is_far_from_the_bounds():
    model = CausalLM("llama_tiny", vocab_size=4096)
    model.configure_model()
    ids = torch.randint(4096, (8, 129), generator=torch.Generator().manual_seed(0))
    found = seen(model, {"input_ids": ids[:, :-1], "labels": ids[:, 1:]}).errors
    assert len(found) == 28 * 3 * len(SCALINGS)
    assert max(one.underflow for one in found.values()) < 0.5 and min(one.sqnr for one in found.values()) > 23


def test_large_operands_are_added_in_parts(monkeypatch):
    values = torch.randn(64, 48, generator=torch.Generator().manual_seed(3))

    def read():
        errors = OperandErrors(RECIPES, ["layer"])
        errors.quantized("layer", "grad_output", values, None, None)
        return errors.read()

    whole = read()
    monkeypatch.setattr(operands, "_ELEMENTS", 100)
    for key, part in read().items():
        assert part.count == whole[key].count and part.sqnr == pytest.approx(whole[key].sqnr)


def test_the_line_to_paste_keeps_the_layer_back():
    model = Net(spoiled="second")
    level = advise(model, batch_of(), ["bf16_with_fp8_current_scaling_mixed", "bf16_mixed"]).level(
        "bf16_with_fp8_current_scaling_mixed"
    )
    assert "second" in level.skip
    names = {"bf16_with_fp8_current_scaling_mixed": nemo_lowprec.bf16_with_fp8_current_scaling_mixed}
    plugin = eval(level.python.removeprefix("plugins="), names)
    plugin.convert_module(model)
    assert "second" not in plugin.engine.columns.computation.conversion.low
    skip = ",".join(level.skip)
    assert level.hydra == f"precision=bf16_with_fp8_current_scaling_mixed 'precision.skip=[{skip}]'"


def test_options_of_a_level_stay_in_the_line():
    precision = LowPrecision("bf16_with_fp8_mixed", convert=None, fast_accum=True, skip=["second"])
    level = advise(Net(spoiled="first"), batch_of(), [precision]).levels[0]
    assert level.python == 'plugins=bf16_with_fp8_mixed(convert=None, fast_accum=True, skip=["second", "first"])'
    assert level.hydra == (
        "precision=bf16_with_fp8_mixed precision.convert=null precision.fast_accum=true 'precision.skip=[second,first]'"
    )


def test_names_of_many_layers_are_globs():
    layers = [f"blocks.{i}.{name}" for i in range(3) for name in ("up", "down")]
    assert patterns_of([x for x in layers if x.endswith("down")], layers) == ["*.down"]
    assert patterns_of(["blocks.0.up", *[x for x in layers if x.endswith("down")]], layers) == ["*.down", "blocks.0.up"]
    assert patterns_of(["blocks.1.up"], layers) == ["blocks.1.up"] and patterns_of([], layers) == []


def test_weights_of_an_attention_are_named_by_their_module():
    class Attends(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention, self.last = nn.MultiheadAttention(32, 2, batch_first=True), nn.Linear(32, 32)

        def forward(self, x):
            return self.last(self.attention(x, x, x, need_weights=False)[0]).square().mean()

    model = Attends()
    with torch.no_grad():
        model.attention.in_proj_weight[0, 0] = 3e4
    found = advise(model, torch.randn(2, 16, 32), ["bf16_with_fp8_current_scaling_mixed"])
    assert "attention.in_proj_weight" in found.levels[0].kept_back and "attention" in found.levels[0].skip
    LowPrecision(found.levels[0].name, skip=list(found.levels[0].skip)).convert_module(model)


# Memory


def test_memory_is_that_of_the_plan():
    model = CausalLM("llama_tiny", vocab_size=512)
    model.configure_model()
    ids = torch.randint(512, (2, 64), generator=torch.Generator().manual_seed(0))
    batch = {"input_ids": ids, "labels": ids.clone()}
    found = advise(model, batch, ["bf16_mixed", "msamp_o2"], gpu_memory=80)
    for level in found.levels:
        plan = plan_training(model, LowPrecision(level.name), micro_batch_size=2, seq_length=64)
        assert level.choice.plan.total == plan.total and level.choice.left == 80 * 2**30 - plan.total


@pytest.mark.parametrize("more", [-1000, 1000])
def test_bytes_of_measured_steps_beyond_their_plan_count_at_every_level(monkeypatch, more):
    def measured(copy, batch, options):
        peak = plan_training(Net(), LowPrecision(options.level.name), batch=batch).total + more
        return MeasuredStep(1000.0, peak)

    monkeypatch.setattr("nemo_lowprec.report.advice.advise.measure_level", measured)
    beyond = max(0, more)
    with made_up_times():
        found = advise(Net(), batch_of(), ["bf16_mixed", "msamp_o1", "msamp_o2"], gpu_memory=1)
    for level in found.levels:
        choice = level.choice
        assert (choice.beyond, choice.total, choice.left) == (
            beyond, choice.plan.total + beyond, 2**30 - choice.plan.total - beyond
        )  # fmt: skip
    said = f"1.0 ms a step at msamp_o2, which takes {bytes_text(more)} beyond its plan." if beyond else "at msamp_o2."
    assert any(said in note for note in found.notes)
    with made_up_times():
        limit = (found.level("msamp_o2").choice.plan.total + beyond) / 2**30
        assert advise(Net(), batch_of(), ["msamp_o2"], gpu_memory=limit).best is not None
        assert advise(Net(), batch_of(), ["msamp_o2"], gpu_memory=limit - 500 / 2**30).best is None


def test_what_does_not_fit_is_not_recommended():
    sizes = {one.name: one.choice.plan.total for one in advise(Net(), batch_of(), gpu_memory=1).levels}
    smallest = min(sizes, key=lambda name: sizes[name])
    found = advise(Net(), batch_of(), gpu_memory=(sizes[smallest] + 1) / 2**30)
    assert found.best is not None and found.best.choice.plan.total <= sizes[smallest]
    none = advise(Net(), batch_of(), gpu_memory=1e-7)
    assert none.best is None and none.lines()[-1].startswith("No level fits.")


def test_a_model_without_values_has_a_plan_alone():
    with torch.device("meta"):
        model = Net()
    found = advise(model, batch_of(), ["msamp_o2"], gpu_memory=80)
    assert not found.sqnr and found.levels[0].choice.fits
    assert "The model's weights have no values here: neither SQNR nor times." in found.notes


def test_a_level_that_refuses_the_weights_is_told():
    model = Net()
    with torch.no_grad():
        model.first.weight[0, 0] = 1e5
    found = advise(model, batch_of(), ["msamp_o2", "bf16_mixed"])
    assert [one.name for one in found.levels] == ["bf16_mixed"]
    assert "first.weight has values beyond 65504" in found.refused["msamp_o2"]


# Times


def test_without_a_gpu_there_are_no_times(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    found = advise(Net(), batch_of())
    assert all(one.ms is None for one in found.levels) and "There is no GPU: no times of a step." in found.notes
    # Of the levels with FP8 GEMMs the one that stores most.
    assert found.best is not None and found.best.name == "bf16_with_fp8_mixed"


@pytest.mark.parametrize("level", ["bf16_with_fp8_mixed", "fp16_with_fp8_mixed", "msamp_o1", "msamp_o3", "te_fp8"])
def test_steps_of_a_level_are_timed_and_change_no_weight(level):
    torch.manual_seed(0)
    timed = half_copy(Net(), CPU)
    before = [param.detach().float() for param in timed.parameters()]
    step = measure_level(timed, batch_of(), LowPrecision(level).parsed)
    assert step.us > 0 and step.peak == 0
    engine = Engine.of(timed)
    assert engine is not None and engine.level.name == level
    rounding = 2.0**-4 if level == "msamp_o3" else 2.0**-10  # of weights to FP8, or to FP16
    for param, was in zip(timed.parameters(), before, strict=True):
        assert torch.allclose(param.detach().float(), was, rtol=rounding, atol=1e-3)
    with made_up_times():  # which ``convert="auto"`` of the steps above has not had
        calls = seen().calls
    assert {call.name for group, _ in calls.groups for call in group} == {"first", "second"}


def test_calls_that_are_repeated_in_backward_count_their_forward_gemm():
    def calls(recomputes):
        model = CausalLM("llama_tiny", vocab_size=512, activation_checkpointing=recomputes)
        model.configure_model()
        ids = torch.zeros(1, 32, dtype=torch.int64)
        found = seen(model, {"input_ids": ids, "labels": ids}).calls
        return [call for group, _ in found.groups.elements() for call in group]

    plain, repeated = calls(False), calls(True)
    assert {(c.rows, c.dgrad, c.wgrad) for c in plain} == {(32, True, True)}
    assert len(repeated) == 2 * len(plain) and sum(c.wgrad for c in repeated) == len(plain)


def times_of(model=None):
    found = seen(model)
    return found, StepTimes(MADE_UP, found, CPU)


def planned(level, **options):
    precision = LowPrecision(level, **options)
    return precision.parsed, plan_training(Net(), precision, batch=batch_of())


def test_measured_levels_are_expected_to_take_what_was_measured():
    _, parts = times_of()
    fp8, plan = planned("bf16_with_fp8_mixed")
    half, of_half = planned("bf16_mixed")
    rest = parts.rest(5e3, 9e3, fp8, plan)
    assert parts.step(fp8, plan, rest) == pytest.approx(9e3)
    assert parts.step(half, of_half, rest) == pytest.approx(5e3 + parts.optimizer(of_half))
    assert parts.rest(5e3).fp8 == parts.rest(5e3).half


def test_a_layer_that_is_kept_back_takes_its_time_in_half_precision():
    found, parts = times_of()
    options, _ = planned("bf16_with_fp8_mixed", convert=None)
    (one,) = [call for group, _ in found.calls.groups for call in group if call.name == "second"]
    low, half = parts.linear(options), parts.linear(options, ["second"])
    expected = MADE_UP.in_half(one) - MADE_UP.in_fp8(one, options.recipe) - MADE_UP.of_input(one, options.recipe, False)
    of_weight, _ = MADE_UP.of_weight(64 * 64, STORED["half"])
    assert half - low == pytest.approx(expected - of_weight, rel=1e-4) and half != low
    # What gains nothing is in half precision anyway.
    auto, _ = planned("bf16_with_fp8_mixed")
    parts = StepTimes(replace(MADE_UP, fp8=replace(MADE_UP.fp8, launch=1e6)), found, CPU)
    assert parts.linear(auto) == pytest.approx(parts.linear(auto, ["first", "second"]), rel=1e-6)


def test_an_optimizer_moves_masters_and_states_twice():
    _, parts = times_of()
    linears = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False))
    plan = plan_training(linears, LowPrecision("bf16_mixed"))
    count = plan.parameters
    # Masters and two states in and out, FP32 gradients in, BF16 weights out.
    assert parts.optimizer(plan) == pytest.approx((3 * 4 * 2 + 4 + 2) * count / MADE_UP.cast[1])
    plan = plan_training(linears, LowPrecision("fp16_amp"))
    assert parts.optimizer(plan) == pytest.approx((2 * 4 * 2 + 4 + 2 * 4) * count / MADE_UP.cast[1])


# Input


def test_models_that_compute_a_loss():
    class Module(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = Net()

        def training_step(self, batch, index):
            assert self.device == next(self.parameters()).device
            loss = self.net(*batch)
            self.log("loss", loss)
            return {"loss": loss}

    class Output(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = Net()

        def forward(self, x, y):
            return {"loss": self.net(x, y), "logits": x}

    x, y = batch_of()
    for model, batch in ((Module(), (x, y)), (Output(), {"x": x, "y": y}), (Net(), [x, y])):
        assert min(advise(model, batch, ["bf16_with_fp8_mixed"]).sqnr["delayed"].values()) > MIN_SQNR


def test_bad_input():
    with pytest.raises(ValueError, match="A forward pass of Sequential gives no loss: advise needs a LightningModule"):
        advise(nn.Sequential(nn.Linear(32, 32)), torch.randn(4, 32))
    with pytest.raises(ValueError, match="Unknown precision level 'msamp_o9'"):
        advise(Net(), batch_of(), ["msamp_o9"])
    with pytest.raises(ValueError, match="no memory of a GPU"):
        advise(Net(), batch_of(), gpu_memory="large")
    with pytest.raises(ValueError, match="no parameters"):
        advise(nn.ReLU(), batch_of())
    with pytest.raises(ValueError, match="has no level 'msamp_o1'"):
        advise(Net(), batch_of(), ["msamp_o2"]).level("msamp_o1")
    converted = Net()
    LowPrecision("bf16_mixed").convert_module(converted)
    with pytest.raises(ValueError, match="converted already"):
        advise(converted, batch_of(), ["bf16_mixed"])


def test_it_is_a_name_of_the_package():
    assert nemo_lowprec.advise is advise and "advise" in dir(nemo_lowprec)

"""``convert="auto"``: times of layers, and the layers that are too small."""

import json
import statistics
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from auto import MADE_UP, made_up_times
from support import values_of
from torch import nn

from nemo_lowprec import prepare
from nemo_lowprec.chart.groups import LayerFilter
from nemo_lowprec.chart.recipe import Recipe
from nemo_lowprec.compute import gemm_times
from nemo_lowprec.compute.choice import CHOICE, Choice
from nemo_lowprec.compute.gemm_times import FAMILIES, STORED, Call, GemmTimes, Roofline, times_of
from nemo_lowprec.compute.producers import Reader, name_reader
from nemo_lowprec.compute.speed_filter import Calls, choose, costs
from nemo_lowprec.engine import Engine

MEASURED = Path(__file__).parents[2] / "benchmarks" / "results"
RECIPE = Recipe("delayed")
FAST = GemmTimes("", Roofline(1.0, 2e4, 4.0), Roofline(0.0, 1e4, 4.0), 1e12, (1.0, 1e12))
CASTS = GemmTimes("", Roofline(0.0, 2e3, 4.0), MADE_UP.half, 1e12, (45.0, 1e12))
H200 = FAMILIES["NVIDIA H200"]


def low(times, call, recipe=RECIPE, is_offered=False):
    return times.in_fp8(call, recipe) + times.of_input(call, recipe, is_offered)


def measured(family):
    for line in (MEASURED / f"gemm_times_{family.lower()}.jsonl").read_text().splitlines()[1:]:
        row = json.loads(line)
        yield Call("", row["m"], row["k"], row["n"], True, True), row["fp8_us"], row["bf16_us"]


@pytest.mark.parametrize(("times", "slower"), [(H200, 1.05), (FAMILIES["NVIDIA H100 80GB HBM3"], 1.06)])
def test_the_roofline_fits_the_measurements(times, slower):
    ratios, off = [], []
    assert times.measured
    for call, fp8, half in measured(times.family):
        ratio = low(times, call) / times.in_half(call)
        off.append(abs(ratio / (fp8 / half) - 1))
        ratios.append((ratio, fp8 / half))
    assert len(off) > 300
    assert statistics.median(off) < 0.04
    assert sorted(off)[int(0.9 * len(off))] < 0.1
    # Nothing is converted that takes clearly longer, and nothing is left that gains clearly.
    assert max(true for found, true in ratios if found < 1) < slower
    assert min(true for found, true in ratios if found >= 1) > 0.95


def test_other_gpus_are_scaled_from_the_h200():
    other = H200.scaled("other", 0.5, 0.25)
    assert not other.measured and other.fp8.flop == 0.5 * H200.fp8.flop and other.fp8.launch == H200.fp8.launch
    many_flop, many_bytes = Call("", 16384, 8192, 8192, True, True), Call("", 16384, 256, 256, True, True)
    assert other.in_half(many_flop) == pytest.approx(2 * H200.in_half(many_flop), rel=0.02)
    assert other.in_half(many_bytes) > 2.5 * H200.in_half(many_bytes)


def test_only_the_gemms_and_casts_that_run_are_counted():
    whole, frozen, first = (Call("", 4096, 1024, 1024, d, w) for d, w in ((True, True), (True, False), (False, True)))
    assert H200.in_half(frozen) < H200.in_half(whole) > H200.in_half(first)
    assert H200.in_fp8(Call("", 4096, 1024, 1024, False, False), RECIPE) == pytest.approx(
        H200.fp8.time(2 * 4096 * 1024**2, (4096 * 1024 + 1024**2 + 2 * 4096 * 1024) / H200.bandwidth)
    )
    in_half = Recipe("delayed", override_linear_precision=(True, True, True))
    assert H200.in_fp8(whole, in_half) == H200.in_half(whole) and H200.of_input(whole, in_half, False) == 0
    assert H200.of_input(whole, Recipe("current"), False) > H200.of_input(whole, RECIPE, False)
    assert H200.of_input(whole, RECIPE, True) == gemm_times.OFFERED * H200.of_input(whole, RECIPE, False)
    saved = (1 - gemm_times.OFFERED) * H200.of_input(whole, RECIPE, False)  # as many elements as the gradient
    assert H200.in_fp8(whole, RECIPE) - H200.in_fp8(whole, RECIPE, True) == pytest.approx(saved)


def test_layers_that_compute_as_one_are_converted_all_or_none():
    names = ["q", "k", "v"]

    def choice(rows, joins):
        calls = Calls()
        calls.groups[tuple(Call(name, rows, 256, 256, True, True) for name in names), False] = 24
        cost = costs(calls, names, H200, RECIPE, STORED["half"], joins=joins)
        return cost, set(choose(cost, names, H200, "BF16", 0).left)

    for rows in (256, 1024, 4096, 16384, 65536):
        alone, joined = choice(rows, False), choice(rows, True)
        assert joined[1] in (set(), set(names)) and joined[1] <= alone[1]
        assert joined[0][:, 1].equal(alone[0][:, 1])  # in half precision nothing changes
        assert joined[0][:, 0].sum() <= alone[0][:, 0].sum() + 1e-3
    assert choice(4096, False)[1] and not choice(4096, True)[1]  # as one they gain


def test_a_gradient_that_an_activation_quantizes_costs_less():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))
    with made_up_times():
        model, optimizer = prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), "bf16_with_fp8_mixed")
        filter = Engine.of(model).columns.computation._filter
        assert filter.offered() == set()
        with torch.autocast("cpu", torch.bfloat16):
            model(torch.randn(16, 32)).float().sum().backward()
        assert filter.offered() == {"0"}
        optimizer.step()


def test_a_cpu_has_no_times_but_those_that_are_given():
    cpu = torch.device("cpu")
    assert times_of(cpu) is None
    with made_up_times():
        assert times_of(cpu) is MADE_UP
    assert times_of(cpu) is None


def chosen(see, names, times=MADE_UP, kept=0, stored="half", by_host=False):
    calls = Calls()
    see(calls)
    return choose(costs(calls, names, times, RECIPE, STORED[stored]), names, times, "BF16", kept, by_host)


def test_a_small_layer_is_left_with_its_sizes_and_times():
    def see(calls):
        calls.see("small", torch.ones(4, 32), 128, True)
        calls.see("large", torch.ones(4, 128, requires_grad=True), 128, True)

    choice = chosen(see, ["small", "large", "unused"])
    # In FP8: 56.4 µs for each of fprop and wgrad, 2 for the padded output gradient; its input's 2 are nobody's.
    assert choice.left == {"small": "too small: 32 × 128 at 4 rows, FP8 takes 1.75 × BF16's time"}
    assert choice.expected == "0.82 × BF16's GPU time expected on CPU of the tests (measured)"
    assert choice.problem is None


@pytest.mark.parametrize(("readers", "is_left"), [(1, True), (2, False)])
def test_layers_that_read_one_tensor_share_its_quantization(readers, is_left):
    x = torch.ones(4, 90, requires_grad=True)  # GEMMs: 3 × 92 µs, gain by FP8 138 - 90, padded input 90
    names = ["q", "k"][:readers]
    choice = chosen(lambda calls: [calls.see(name, x, 128, True) for name in names], names, CASTS)
    assert set(choice.left) == (set(names) if is_left else set())


def test_equal_tensors_are_not_one():
    def see(calls):
        for name in ("q", "k"):
            calls.see(name, torch.ones(4, 90, requires_grad=True), 128, True)

    assert set(chosen(see, ["q", "k"], CASTS).left) == {"q", "k"}


def test_a_quantized_input_that_the_module_before_writes_is_cheaper():
    names, x = ["one"], torch.ones(4, 150, requires_grad=True)  # GEMMs: 3 × 154 µs; output gradient and input 90 each

    def see(calls):
        calls.see("one", x, 128, True)

    times = replace(CASTS, cast=(60.0, 1e12))
    assert chosen(see, names, times).left
    name_reader(x, Reader())
    assert not chosen(see, names, times).left


@pytest.mark.parametrize("rows", [4, 16])
def test_rows_that_fp8_gemms_do_not_take_are_copied(rows):
    call = Call("", rows, 64, 64, True, True)
    launches = 2 if rows == 4 else 1
    assert CASTS.of_input(call, RECIPE, False) == pytest.approx(launches * 45, rel=1e-6)
    assert CASTS.in_fp8(call, RECIPE) == pytest.approx(launches * 45 + 3 * call.flop / 2e3, rel=1e-6)


def test_the_casts_of_weights_count_on_both_sides():
    """FP32 weights are cast in each call of a layer in half precision, and once a step for FP8."""
    costs_of = {}
    for stored in STORED:
        for calls_of_step in (1, 3):
            calls = Calls()
            for _ in range(calls_of_step):
                calls.see("one", torch.ones(16, 64, requires_grad=True), 64, True)
            low, half, *_ = costs(calls, ["one"], H200, RECIPE, STORED[stored])[0].tolist()
            costs_of[stored, calls_of_step] = low, half
    plain, weight = costs_of["half", 1], 64 * 64 / H200.cast[1]
    assert costs_of["fp32", 1] == pytest.approx((plain[0] + 2 * weight, plain[1] + 2 * 2.0 + 10 * weight))
    assert costs_of["fp32", 3][1] == pytest.approx(3 * costs_of["fp32", 1][1])
    assert costs_of["fp32", 3][0] < 3 * costs_of["fp32", 1][0]
    assert costs_of["fp16", 3][1] - costs_of["half", 3][1] == pytest.approx(2.0 + 4 * weight, rel=1e-4)
    assert costs_of["fp8", 1][0] < plain[0] and costs_of["fp8", 1][1] > plain[1] + 3 * 2.0


def test_the_host_counts_where_it_launches_layer_by_layer():
    """On a GPU that takes no time the host decides; on one that takes long, nothing is left that gains."""
    names = ["a", "b", "c", "d"]

    def see(calls, rows=4):
        for name in names:
            calls.see(name, torch.ones(rows, 128, requires_grad=True), 128, True)

    assert not chosen(see, names).left
    left = chosen(see, names, by_host=True).left
    # Each takes 321 µs in FP8 and 393 in BF16 on the GPU, and 230 or 140 µs on the host: the GPU is the limit.
    assert not left
    assert not chosen(see, names, FAST).left
    left = chosen(see, names, FAST, by_host=True).left
    assert set(left) == set(names)
    assert all(reason.endswith("× BF16's time, but the GPU waits for the host") for reason in left.values())


def test_layers_that_gain_least_are_left_until_the_host_keeps_up():

    def see(calls, rows=4, large=1):
        calls.see("small", torch.ones(4, 128, requires_grad=True), 128, True)
        for i in range(large):
            calls.see(f"large{i}", torch.ones(rows, 512, requires_grad=True), 512, True)

    # The GPU's time: 27 µs or 39 for the small layer; 10 ms or 20 ms for the large one, which hides the host's time.
    assert not chosen(lambda calls: see(calls, 128), ["small", "large0"], FAST, by_host=True).left
    # 322 and 629 µs for each large one: without the small one the host takes 640 µs, not 750, and the GPU 683.
    names = ["small", "large0", "large1"]
    assert set(chosen(lambda calls: see(calls, 4, 2), names, FAST, by_host=True).left) == {"small"}


def test_compiled_calls_cost_the_host_nothing():
    assert not chosen(lambda calls: calls.see_traced("one", 4, 128, 128, True), ["one"], FAST, by_host=True).left


def test_calls_of_a_layer_add_up():
    def see(calls):
        for rows in (1, 64):
            calls.see("one", torch.ones(rows, 128, requires_grad=True), 128, True)

    assert not chosen(see, ["one"]).left
    assert chosen(lambda calls: calls.see("one", torch.ones(1, 128, requires_grad=True), 128, True), ["one"]).left


def test_more_than_half_of_the_flop_in_half_precision_is_a_problem():
    def see(calls):
        calls.see("small", torch.ones(4, 32), 128, True)

    problem = chosen(see, ["small"]).problem
    assert problem.startswith("100% of the FLOP of the model's matrices stay in BF16: 1 layers are too small")

    def see_both(calls):
        see(calls)
        calls.see("large", torch.ones(4, 128, requires_grad=True), 128, True)

    assert chosen(see_both, ["small", "large"], kept=0).problem is None
    assert chosen(see_both, ["small", "large"], kept=10**6).problem is not None


def test_nobody_is_left_for_what_was_not_called():
    assert not chosen(lambda calls: None, ["a", "b"]).left


def test_auto_is_a_word_and_a_list_names_layers():
    assert LayerFilter().is_auto and LayerFilter().chosen is None
    assert not LayerFilter(["auto"]).is_auto and LayerFilter(["auto"]).chosen == ("auto",)
    assert LayerFilter(None).chosen is None and not LayerFilter(None).is_auto
    assert LayerFilter("*").chosen == ("*",)


@pytest.mark.parametrize("level", ["te_fp8", "bf16_with_fp8_mixed", "msamp_o2", "msamp_o3"])
def test_gemms_of_torch_are_those_of_a_linear_layer(level):
    """What a GPU does with a layer that is left: the results of ``nn.Linear``, and FP32 gradients of half weights."""
    torch.manual_seed(0)
    model, optimizer = prepare(nn.Sequential(nn.Linear(32, 64)), None, level, backend="reference")
    kept = type(model[0].weight), getattr(model[0].weight, "dtype", None)
    computation = Engine.of(model).columns.computation
    computation._filter._half_backend = None  # as on a GPU
    computation.load_state_dict({CHOICE: Choice({"0": "too small"}).state_dict()})
    assert model[0].gemm_plan.by_torch and model[0].gemm_plan.recipe is None
    assert (type(model[0].weight), model[0].weight.dtype) == kept
    weight, bias = (values_of(p).detach().float() for p in (model[0].weight, model[0].bias))
    for x in (torch.randn(2, 4, 32), torch.randn(4, 32)):
        with torch.autocast("cpu", torch.bfloat16):
            out = model(x)
            want = nn.functional.linear(x, weight, bias)
        assert torch.equal(out.bfloat16(), want)
        optimizer.zero_grad()
        out.float().square().sum().backward()
        gradient = (2 * want.float()).flatten(0, -2).T @ x.bfloat16().float().flatten(0, -2)
        found = values_of(model[0].weight.grad).float()
        assert (found - gradient).norm() < 0.05 * gradient.norm()

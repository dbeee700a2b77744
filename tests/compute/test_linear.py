"""The converted linear layer: what its arguments do, and every way in which a layer is used."""

import copy

import pytest
import torch
from numerics import sqnr
from torch import nn
from torch.utils.checkpoint import checkpoint

from nemo_lowprec.chart.groups import LayerFilter
from nemo_lowprec.chart.recipe import Recipe
from nemo_lowprec.compute import LowPrecisionConv1D, LowPrecisionLinear, ReferenceBackend, convert_layers
from nemo_lowprec.compute.gemm_plan import GemmPlan
from nemo_lowprec.compute.operands import OPERANDS, new_histories, operand_of
from nemo_lowprec.formats import E4M3
from nemo_lowprec.tensors import Fp8Weight

SCALINGS = ["delayed", "current", "rowwise", "blockwise", "mxfp8", "nvfp4"]
HALF = torch.bfloat16


def recipe(scaling="delayed", **options):
    return Recipe(scaling, **{"fp8": "e4m3" if scaling in ("mxfp8", "nvfp4") else "hybrid", **options})


def make(scaling="delayed", bias=True, dtype=torch.float32, half=HALF, **options):
    """(converted layer 128 -> 128, histories)."""
    torch.manual_seed(0)
    layer = nn.Linear(128, 128, bias=bias).to(dtype)
    return convert(layer, scaling, half, **options)


def convert(module, scaling="delayed", half=HALF, **options):
    r = recipe(scaling, **options)
    histories = new_histories(r)
    convert_layers(module, half, r, ReferenceBackend(), None, LayerFilter(), histories)
    return module, histories


def half_layer(dtype=torch.float32, bias=True, half=HALF):
    """The same layer with all its GEMMs in half precision."""
    torch.manual_seed(0)
    layer = nn.Linear(128, 128, bias=bias).to(dtype)
    convert_layers(layer, half, None, ReferenceBackend(), ReferenceBackend(), LayerFilter(), None)
    return layer


def inputs(*shape, seed=1, dtype=torch.float32):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(*(shape or (32, 128)), generator=g).bfloat16().to(dtype)


def gradients(layer, x, dy=None, autocast=False):
    """(output, grad_input, grad_weight, grad_bias)."""
    x = x.detach().clone().requires_grad_()
    layer.zero_grad()
    torch.manual_seed(5)
    with torch.autocast("cpu", HALF, enabled=autocast):
        out = layer(x)
    out.backward(inputs(*out.shape, seed=2, dtype=out.dtype) if dy is None else dy)
    return out.detach(), x.grad, layer.weight.grad, layer.bias.grad if layer.bias is not None else None


# The arguments


@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("gemm", [0, 1, 2])
def test_override_linear_precision_runs_that_gemm_in_half_and_the_others_not(scaling, gemm):
    flags = tuple(i == gemm for i in range(3))
    got = gradients(make(scaling, override_linear_precision=flags)[0], inputs())
    half = gradients(half_layer(), inputs())
    fp8 = gradients(make(scaling)[0], inputs())
    for i in range(3):
        assert torch.equal(got[i], half[i]) == (i == gemm)
        if scaling != "nvfp4":  # whose random rounding meets another order of draws
            assert torch.equal(got[i], fp8[i]) == (i != gemm)


@pytest.mark.parametrize("scaling", SCALINGS)
def test_overriding_all_three_is_the_half_layer(scaling):
    got = gradients(make(scaling, override_linear_precision=(True, True, True))[0], inputs())
    assert all(torch.equal(a, b) for a, b in zip(got, gradients(half_layer(), inputs()), strict=True))


@pytest.mark.parametrize("scaling", ["delayed", "current", "rowwise", "blockwise"])
def test_fp8_format_changes_gradients_only(scaling):
    hybrid = gradients(make(scaling, fp8="hybrid")[0], inputs())
    e4m3 = gradients(make(scaling, fp8="e4m3")[0], inputs())
    assert torch.equal(hybrid[0], e4m3[0]) and torch.equal(hybrid[3], e4m3[3])
    assert not torch.equal(hybrid[1], e4m3[1]) and not torch.equal(hybrid[2], e4m3[2])


def after(amaxes, x, **options):
    """The noise of the output after steps with inputs of these sizes."""
    layer, histories = make("delayed", bias=False, **options)
    for size in amaxes:
        layer(x * size).sum().backward()
        histories.update()
    return sqnr(layer(x).detach(), x.double() @ layer.weight.detach().double().t())


def test_margin_leaves_headroom_for_inputs_that_grow():
    x = inputs()
    assert after([0.25], x, fp8_margin=0) < 10  # a quarter of the range: clipped
    assert after([0.25], x, fp8_margin=2) > 27


def test_margin_lowers_current_scales_too():
    for margin in (0, 3):
        layer, _ = make("current", fp8_margin=margin)
        operand = layer.gemm_plan.operands["input"]
        x8 = ReferenceBackend().quantize(inputs(), operand, rowwise=True, columnwise=False, record=True)
        assert x8.rowwise.data.float().abs().max() == 448 / 2**margin


def test_history_length_says_how_long_an_amax_is_remembered():
    x = inputs()
    spike = [2.0**16, 1.0, 1.0]
    assert after(spike, x, fp8_amax_history_len=3) < 20  # scaled for the spike: most of x underflows
    assert after(spike, x, fp8_amax_history_len=2) > 27


def test_most_recent_forgets_at_once():
    x = inputs()
    assert after([2.0**16, 1.0], x, fp8_amax_compute_algo="max") < 20
    assert after([2.0**16, 1.0], x, fp8_amax_compute_algo="most_recent") > 27


def test_interval_keeps_old_scales_in_between():
    x = inputs()
    sizes = [0.0625, 0.0625, 1.0]
    assert after(sizes, x, interval=1, fp8_amax_compute_algo="most_recent") > 27
    assert after(sizes, x, interval=2, fp8_amax_compute_algo="most_recent") < 10


@pytest.mark.parametrize("scaling", ["delayed", "current"])
def test_a_weight_stored_in_fp8_is_used_as_it_is(scaling):
    layer, histories = make(scaling, bias=False, override_linear_precision=(False, False, True))
    plain = copy.deepcopy(layer)
    layer.weight = nn.Parameter(Fp8Weight.from_float(layer.weight, E4M3, HALF))
    layer.weight.grad_dtype = torch.float32
    out, dx, dw, _ = gradients(layer, inputs())
    # The values of the storage, not rounded a second time; stored from the same amax, they are those of the GEMM.
    want = gradients(plain, inputs())
    torch.testing.assert_close((out, dx, dw), want[:3], rtol=1e-6, atol=1e-6)
    if histories is not None:
        histories.update()
        assert not histories.slots[".input"].cold
        histories.slots[".input"].cold = True
    with torch.no_grad():
        layer.weight.mul_(2)  # in bf16, which moves the amax and with it the scale by up to 2**-9
    torch.testing.assert_close(layer(inputs()), 2 * out, rtol=2**-8, atol=1e-3)


def test_a_weight_stored_in_fp8_works_with_overridden_gemms():
    for flags in ((True, False, False), (False, True, False), (True, True, True)):
        layer, _ = make("delayed", override_linear_precision=flags)
        layer.weight = nn.Parameter(Fp8Weight.from_float(layer.weight, E4M3, HALF))
        layer.weight.grad_dtype = torch.float32
        out, dx, dw, _ = gradients(layer, inputs())
        w = layer.weight.dequantize(torch.float32).double()
        assert sqnr(out - layer.bias.detach(), inputs().double() @ w.t()) > 28
        assert sqnr(dx, inputs(32, 128, seed=2).double() @ w) > 24
        assert dw.dtype == torch.float32


# Ways in which a layer is used


@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("shape", [(128,), (1, 128), (5, 128), (2, 3, 128), (2, 2, 5, 128)])
def test_inputs_of_any_number_of_dimensions_and_rows(scaling, shape):
    layer, _ = make(scaling)
    x = inputs(*shape)
    out, dx, dw, db = gradients(layer, x)
    assert out.shape == shape and dx.shape == shape and dw.shape == (128, 128)
    dy = inputs(*shape, seed=2).reshape(-1, 128).double()
    w, flat = layer.weight.detach().double(), x.reshape(-1, 128).double()
    floor = 12 if scaling == "nvfp4" else 23
    assert sqnr(out - layer.bias.detach(), (flat @ w.t()).view(shape)) > floor
    assert sqnr(dx, (dy @ w).view(shape)) > floor
    assert sqnr(dw, dy.t() @ flat) > floor
    torch.testing.assert_close(db.double(), dy.sum(0), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("shape", [(0, 128), (2, 0, 128)])
def test_an_empty_batch(scaling, shape):
    layer, histories = make(scaling)
    out, dx, dw, db = gradients(layer, torch.empty(shape))
    assert out.shape == dx.shape == shape
    assert dw.abs().sum() == 0 and db.abs().sum() == 0
    # FSDP2 hooks into the output of a block; an in-place operation on a view would lose the hook.
    assert not layer(torch.empty(shape, requires_grad=True))._is_view()
    if histories is not None:
        histories.update()
        assert all(slot.cold for slot in histories.slots.values())


@pytest.mark.parametrize("scaling", SCALINGS)
def test_rows_of_padding_change_nothing(scaling):
    override = (False, False, True) if scaling == "nvfp4" else (False,) * 3  # random rounding depends on the shape
    layer, _ = make(scaling, override_linear_precision=override)
    x, dy = inputs(13, 128), inputs(13, 128, seed=2)
    odd = gradients(layer, x, dy)
    even = gradients(layer, torch.cat([x, torch.zeros(3, 128)]), torch.cat([dy, torch.zeros(3, 128)]))
    torch.testing.assert_close(odd[0], even[0][:13])
    torch.testing.assert_close(odd[2:], even[2:])


@pytest.mark.parametrize("scaling", SCALINGS)
def test_inputs_and_gradients_that_are_not_contiguous(scaling):
    layer, _ = make(scaling)
    x, dy = inputs(128, 32).t(), inputs(128, 32, seed=2).t()
    got = gradients(layer, x, dy)
    want = gradients(layer, x.contiguous(), dy.contiguous())
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    # An expanded gradient is what .sum() sends.
    x = inputs().requires_grad_()
    layer(x).sum().backward()
    assert torch.isfinite(x.grad).all()


@pytest.mark.parametrize("scaling", SCALINGS)
def test_without_a_bias(scaling):
    with_bias, _ = make(scaling)
    without, _ = make(scaling, bias=False)
    with torch.no_grad():
        without.weight.copy_(with_bias.weight)
        with_bias.bias.zero_()
    a, b = gradients(without, inputs()), gradients(with_bias, inputs())
    assert all(torch.equal(u, v) for u, v in zip(a[:3], b[:3], strict=True)) and a[3] is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bias_gradients_are_summed_in_fp32_and_exact(dtype):
    layer, _ = make("delayed", dtype=dtype)
    layer.bias.grad_dtype = None
    dy = inputs(512, 128, seed=2, dtype=dtype)
    db = gradients(layer, inputs(512, 128, dtype=dtype), dy)[3]
    assert db.dtype == dtype and torch.equal(db, dy.float().sum(0).to(dtype))


@pytest.mark.parametrize("frozen", ["weight", "bias", "both", "input", "input and weight"])
def test_only_what_needs_a_gradient_gets_one(frozen):
    layer, _ = make("delayed")
    want = gradients(make("delayed")[0], inputs())
    layer.weight.requires_grad_(frozen not in ("weight", "both", "input and weight"))
    layer.bias.requires_grad_(frozen not in ("bias", "both"))
    x = inputs().requires_grad_("input" not in frozen)
    out = layer(x)
    out.backward(inputs(*out.shape, seed=2))
    for got, needs, expected in (
        (x.grad, x.requires_grad, want[1]),
        (layer.weight.grad, layer.weight.requires_grad, want[2]),
        (layer.bias.grad, layer.bias.requires_grad, want[3]),
    ):
        assert torch.equal(got, expected) if needs else got is None


def test_fully_frozen_and_no_grad_layers_compute_the_same_output():
    layer, _ = make("current")
    want = layer(inputs()).detach()
    with torch.no_grad():
        assert torch.equal(layer(inputs()), want)
    with torch.inference_mode():
        assert torch.equal(layer(inputs()), want)
    layer.requires_grad_(False)
    assert torch.equal(layer(inputs()), want)


@pytest.mark.parametrize("scaling", ["delayed", "current", "rowwise", "blockwise", "mxfp8"])
def test_one_layer_used_twice_is_two_layers_of_one_weight(scaling):
    layer, histories = make(scaling)
    x = inputs().requires_grad_()
    layer(layer(x)).sum().backward()
    first, second = copy.deepcopy(make(scaling)[0]), make(scaling)[0]
    second.weight, second.bias = first.weight, first.bias
    z = inputs().requires_grad_()
    second(first(z)).sum().backward()
    assert torch.equal(x.grad, z.grad) and torch.equal(layer.weight.grad, first.weight.grad)
    if histories is not None:
        want = max(inputs().abs().max(), first(inputs()).bfloat16().abs().max()).item()
        assert histories.slots[".input"].amax.item() == want


def test_backward_twice_through_one_graph():
    layer, _ = make("delayed")
    out = layer(inputs()).sum()
    out.backward(retain_graph=True)
    once = layer.weight.grad.clone()
    out.backward()
    assert torch.equal(layer.weight.grad, 2 * once)


@pytest.mark.parametrize("change", ["relu_", "add_", "setitem"])
@pytest.mark.parametrize("shape", [(16, 128), (5, 128), (2, 3, 128), (128,)], ids=str)
@pytest.mark.parametrize("scaling", [*SCALINGS, None])
def test_an_output_may_be_changed_in_place(scaling, shape, change):
    def changed(layer, x, in_place):
        h = layer(x)
        other = inputs(*h.shape, seed=3)
        if change == "relu_":
            return torch.relu_(h) if in_place else torch.relu(h)
        if change == "add_":
            return h.add_(other) if in_place else h + other
        mask = torch.zeros_like(h)
        mask[0] = 1
        if in_place:
            h[0] = 0.0
            return h
        return h * (1 - mask)

    results = []
    for in_place in (True, False):
        layer = half_layer() if scaling is None else make(scaling)[0]
        x = inputs(*shape).requires_grad_()
        torch.manual_seed(5)
        out = changed(layer, x, in_place)
        out.square().sum().backward()
        results.append((out.detach(), x.grad, layer.weight.grad, layer.bias.grad))
    assert all(torch.equal(got, want) for got, want in zip(*results, strict=True))


class NoGradient(torch.autograd.Function):
    """A consumer that has no gradient for what it consumed."""

    @staticmethod
    def forward(ctx, x):
        return x.sum()

    @staticmethod
    def backward(ctx, grad):
        return None


@pytest.mark.parametrize("is_leaf", [True, False])
@pytest.mark.parametrize("scaling", [*SCALINGS, None])
def test_a_consumer_that_returns_no_gradient(scaling, is_leaf):
    layer = half_layer() if scaling is None else make(scaling)[0]
    leaf = inputs().requires_grad_()
    NoGradient.apply(layer(leaf if is_leaf else leaf * 1)).backward()
    assert leaf.grad is None and all(p.grad is None for p in layer.parameters())


def test_reentrant_checkpointing_with_an_input_that_is_not_used():
    layer, _ = make("delayed")
    x, y = inputs().requires_grad_(), inputs(seed=2).requires_grad_()
    checkpoint(lambda used, unused: used * 2, x * 1, layer(y), use_reentrant=True).sum().backward()
    assert torch.equal(x.grad, torch.full_like(x, 2)) and y.grad is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("autocast", [False, True])
def test_output_is_half_under_autocast_and_the_inputs_dtype_without(dtype, autocast):
    layer, _ = make("delayed", dtype=dtype)
    out, dx, dw, db = gradients(layer, inputs(dtype=dtype), autocast=autocast)
    assert out.dtype == (HALF if autocast else dtype)
    assert dx.dtype == dtype and dw.dtype == dtype and db.dtype == dtype


@pytest.mark.parametrize("weight", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("x", [torch.float32, torch.bfloat16])
def test_weights_and_inputs_of_different_dtypes_multiply(weight, x):
    layer, _ = make("current", dtype=weight)
    out, _, dw, _ = gradients(layer, inputs(dtype=x))
    want = inputs().double() @ layer.weight.detach().double().t() + layer.bias.detach().double()
    assert out.dtype == x and dw.dtype == weight and sqnr(out, want) > 27


def test_half_weights_get_fp32_gradients_where_they_ask_for_them():
    layer, _ = make("delayed", dtype=HALF)
    layer.weight.grad_dtype = torch.float32
    dw = gradients(layer, inputs(dtype=HALF), inputs(seed=2, dtype=HALF))[2]
    reference, _ = make("delayed", dtype=HALF)
    rounded = gradients(reference, inputs(dtype=HALF), inputs(seed=2, dtype=HALF))[2]
    assert dw.dtype == torch.float32 and not torch.equal(dw, dw.bfloat16().float())
    assert torch.equal(dw.bfloat16(), rounded)


def test_fp16_is_a_half_dtype_like_bf16():
    layer, _ = make("delayed", half=torch.float16)
    with torch.autocast("cpu", torch.float16):
        assert layer(inputs()).dtype == torch.float16


def test_a_weight_that_is_computed_gets_its_gradient():
    layer, _ = make("current")
    weight = layer.weight.detach().clone().requires_grad_()
    torch.func.functional_call(layer, {"weight": weight * 2}, (inputs(),)).sum().backward()
    with torch.no_grad():
        layer.weight.mul_(2)
    layer(inputs()).sum().backward()
    assert torch.equal(weight.grad, 2 * layer.weight.grad) and layer.weight.grad is not None


def test_wrong_number_of_features_is_an_error():
    for scaling in SCALINGS:
        with pytest.raises(RuntimeError):
            make(scaling)[0](inputs(4, 64))


def test_repr_names_the_scaling_and_the_backend():
    assert "in_features=128, out_features=128, bias=True, delayed, backend=reference" in repr(make()[0])
    assert "half, backend=reference" in repr(half_layer())


# Amaxes


def test_training_records_and_evaluation_does_not():
    layer, histories = make("delayed")
    layer.eval()
    gradients(layer, inputs())
    assert histories.amax.abs().sum() == 0
    layer.train()
    out, *_ = gradients(layer, inputs())
    want = {".input": inputs(), ".grad_output": inputs(*out.shape, seed=2)}
    assert {n: s.amax.item() for n, s in histories.slots.items()} == {n: v.abs().max().item() for n, v in want.items()}


def test_evaluation_uses_the_scales_of_training():
    layer, histories = make("delayed")
    gradients(layer, 8 * inputs())
    histories.update()
    trained = layer(inputs()).detach()
    assert torch.equal(layer.eval()(inputs()), trained)
    assert not torch.equal(make("delayed")[0](inputs()), trained)


def test_micro_batches_of_a_step_are_scaled_alike_and_sum_to_the_full_batch():
    layer, histories = make("delayed", fp8="e4m3")
    gradients(layer, inputs(64, 128))
    histories.update()
    x, dy = inputs(64, 128), inputs(64, 128, seed=2)
    full = gradients(layer, x, dy)
    histories.discard()
    layer.zero_grad()
    for part in range(4):
        rows = slice(16 * part, 16 * part + 16)
        layer(x[rows]).backward(dy[rows])
    torch.testing.assert_close(layer.weight.grad, full[2], rtol=1e-5, atol=1e-5)
    assert histories.slots[".input"].amax.item() == x.abs().max().item()


def test_non_finite_inputs_spread_as_nan_and_leave_the_next_step_alone():
    layer, histories = make("delayed")
    x = inputs()
    x[3, 5] = float("nan")
    out = gradients(layer, x)[0]
    assert out[3].isnan().all() and out[:3].isfinite().all()
    histories.update()
    assert gradients(layer, inputs())[0].isfinite().all()


# Around the layer


class Block(nn.Module):
    def __init__(self, mode):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.drop, self.mode = nn.Linear(128, 256), nn.Linear(256, 128), nn.Dropout(0.2), mode

    def inner(self, x):
        return self.drop(self.b(nn.functional.gelu(self.a(x))))

    def forward(self, x):
        if self.mode == "none":
            return x + self.inner(x)
        return x + checkpoint(self.inner, x, use_reentrant=self.mode == "reentrant")


@pytest.mark.parametrize("scaling", ["delayed", "current", "rowwise", "blockwise", "mxfp8", "nvfp4"])
@pytest.mark.parametrize("mode", ["reentrant", "non_reentrant"])
def test_activation_checkpointing_changes_nothing(scaling, mode):
    def train(mode):
        model = nn.Sequential(Block(mode), Block(mode))
        _, histories = convert(model, scaling)
        results = []
        torch.manual_seed(3)
        for step in range(3):
            x = inputs(16, 128, seed=step).requires_grad_()
            with torch.autocast("cpu", HALF):
                loss = model(x).float().square().mean()
            loss.backward()
            if histories is not None:
                histories.update()
            results += [loss.detach(), x.grad, *(p.grad.clone() for p in model.parameters())]
        return results, histories.state_dict() if histories is not None else {}

    (want, state), (got, recomputed) = train("none"), train(mode)
    if scaling == "nvfp4":  # random rounding draws between the recomputations: only the forward of a step can be equal
        assert torch.equal(want[0], got[0])
        return
    assert all(torch.equal(a, b) for a, b in zip(want, got, strict=True))
    assert str(state) == str(recomputed)


@pytest.mark.parametrize("scaling", ["delayed", "blockwise"])
def test_torch_compile_of_a_model_with_converted_layers_matches(scaling):
    def run(compiled):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(128, 256), nn.LayerNorm(256), nn.GELU(), nn.Linear(256, 128))
        convert(model, scaling)
        # The graphs between the layers, without the minutes that a C++ compiler takes.
        call = torch.compile(model, backend="aot_eager") if compiled else model
        with torch.autocast("cpu", HALF):
            out = call(inputs())
        out.float().square().mean().backward()
        return [out, *(p.grad for p in model.parameters())]

    for got, want in zip(run(True), run(False), strict=True):
        assert got.dtype == want.dtype
        torch.testing.assert_close(got, want, rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("scaling", ["delayed", "current", "rowwise", "blockwise", "mxfp8"])
def test_what_waits_for_backward_is_one_byte_an_element(scaling):
    layer, _ = make(scaling)
    saved = []

    def pack(tensor):
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        layer(inputs(256, 128).requires_grad_())
    data = [t for t in saved if t.element_size() == 1]
    scales = [t for t in saved if t.element_size() != 1]
    assert sorted(t.numel() for t in data) == [128 * 128, 256 * 128]
    assert sum(t.numel() for t in scales) <= (128 * 128 + 256 * 128) // 32


def test_half_layers_round_operands_and_results_and_accumulate_in_fp32():
    layer = half_layer()
    x, w = inputs(), layer.weight.detach()
    out, dx, dw, _ = gradients(layer, x, autocast=True)
    dy = inputs(seed=2)
    assert torch.equal(out, (x @ w.bfloat16().float().t()).bfloat16() + layer.bias.bfloat16())
    assert torch.equal(dx, dy @ w.bfloat16().float()) and torch.equal(dw, dy.t() @ x)


def test_a_conv1d_stored_in_fp8_computes_what_the_linear_layer_does():
    weight = Fp8Weight.from_float(torch.randn(48, 64, generator=torch.Generator().manual_seed(3)), E4M3, HALF)
    current = recipe("current")
    operands = {kind: operand_of(current, kind) for kind in OPERANDS}
    results = []
    for cls, stored in ((LowPrecisionLinear, weight), (LowPrecisionConv1D, weight.transposed())):
        layer = nn.Linear(64, 48, bias=False)
        layer.weight = nn.Parameter(Fp8Weight(stored.data_fp8.contiguous(), stored.scale_inv, E4M3, HALF))
        layer.__class__ = cls
        layer.gemm_plan = GemmPlan(ReferenceBackend(), HALF, current, operands)
        x = torch.randn(32, 64, generator=torch.Generator().manual_seed(4)).to(HALF).requires_grad_()
        out = layer(x)
        out.backward(torch.ones_like(out))
        grad = layer.weight.grad
        results.append((out, x.grad, grad if cls is LowPrecisionLinear else grad.t()))
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)

"""Second derivatives of a converted linear layer: whose they are, and that nothing is kept for them."""

import gc
from weakref import ref

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from nemo_lowprec.chart.groups import LayerFilter
from nemo_lowprec.chart.recipe import Recipe
from nemo_lowprec.compute import LowPrecisionConv1D, ReferenceBackend, convert_layers
from nemo_lowprec.compute.double_backward import _values
from nemo_lowprec.compute.operands import new_histories, operand_of
from nemo_lowprec.formats import E4M3
from nemo_lowprec.tensors import Fp8Weight, Fp16Weight

SCALINGS = ["delayed", "current", "rowwise", "blockwise", "mxfp8", "nvfp4"]
HALF = torch.bfloat16
# Of one GEMM whose operands are rounded to half, and of one with an input that was rounded to the recipe's format.
HALF_BOUND = 6e-3
INPUT_BOUND = {"nvfp4": 0.2, None: HALF_BOUND}


def convert(module, scaling, **options):
    options = {"fp8": "e4m3" if scaling in ("mxfp8", "nvfp4") else "hybrid", **options}
    recipe = None if scaling is None else Recipe(scaling, **options)
    histories = None if recipe is None else new_histories(recipe)
    half = ReferenceBackend() if recipe is None else None
    convert_layers(module, HALF, recipe, ReferenceBackend(), half, LayerFilter(), histories)
    return module


def linear(scaling, bias=True, **options):
    torch.manual_seed(0)
    return convert(nn.Linear(128, 64, bias=bias), scaling, **options)


def values(*shape, seed=1):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16().float()


def relative_error(got, want):
    return float((got.float() - want).norm() / want.norm())


@pytest.mark.parametrize("shape", [(32,), (5,), (2, 3)], ids=str)
@pytest.mark.parametrize("is_leaf", [True, False])
@pytest.mark.parametrize(
    ("scaling", "override"), [(None, None), *((s, gemm) for s in SCALINGS for gemm in (None, 0, 1, 2))]
)
def test_second_derivatives_are_those_of_a_linear_layer(scaling, is_leaf, shape, override):
    flags = {} if override is None else {"override_linear_precision": tuple(i == override for i in range(3))}
    layer = linear(scaling, **flags)
    leaf = values(*shape, 128).requires_grad_()
    dy = values(*shape, 64, seed=2).requires_grad_()
    a, b, c = values(*shape, 128, seed=3), values(64, 128, seed=4), values(64, seed=5)
    x = leaf if is_leaf else leaf * 1
    dx, dw, db = torch.autograd.grad(layer(x), (x, layer.weight, layer.bias), dy, create_graph=True)
    x2, dy2 = leaf.detach().flatten(0, -2), dy.detach().flatten(0, -2)
    weight, a2 = layer.weight.detach(), a.flatten(0, -2)
    to_input = HALF_BOUND if override == 2 else INPUT_BOUND.get(scaling, 0.05)
    assert relative_error(dx.flatten(0, -2), dy2 @ weight) < HALF_BOUND
    assert relative_error(dw, dy2.t() @ x2) < to_input and relative_error(db, dy2.sum(0)) < HALF_BOUND
    gx, gw, gdy = torch.autograd.grad((dx * a).sum() + (dw * b).sum() + (db * c).sum(), (leaf, layer.weight, dy))
    assert relative_error(gx.flatten(0, -2), dy2 @ b) < HALF_BOUND
    assert relative_error(gw, dy2.t() @ a2) < HALF_BOUND
    assert relative_error(gdy.flatten(0, -2), a2 @ weight.t() + x2 @ b.t() + c) < to_input


@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("rows", [16, 2064])
def test_saved_values_are_those_that_the_weight_gradient_is_computed_from(scaling, rows):
    recipe = Recipe(scaling, fp8="e4m3")
    backend, kind, dy = ReferenceBackend(), operand_of(recipe, "input"), operand_of(recipe, "grad_output")
    saved = backend.quantize(values(rows, 128), kind, rowwise=False, columnwise=True, record=False)
    got = _values(backend, saved, rows, kind, torch.float32, torch.device("cpu"))
    grad = backend.quantize(values(rows, 64, seed=2), dy, rowwise=False, columnwise=True, record=False)
    # The gradient as it was rounded is read in the same way.
    as_rounded = _values(backend, grad, rows, kind, torch.float32, torch.device("cpu"))
    torch.testing.assert_close(as_rounded.t() @ got, backend.wgrad(grad, saved, torch.float32), rtol=1e-3, atol=1e-2)
    assert relative_error(got, values(rows, 128)) < INPUT_BOUND.get(scaling, 0.05)


@pytest.mark.parametrize("scaling", ["delayed", "blockwise", None])
def test_a_third_derivative(scaling):
    def third(layer, x):
        grads = [(torch.tanh(layer(x)) ** 2).sum()]
        for _ in range(2):
            (grad,) = torch.autograd.grad(grads[-1].sum(), x, create_graph=True)
            grads.append(grad.square().sum())
        return torch.autograd.grad(grads[-1], (x, layer.weight))

    x = 0.3 * values(32, 128)
    torch.manual_seed(0)
    want = third(nn.Linear(128, 64), x.clone().requires_grad_())
    for got, exact in zip(third(linear(scaling), x.clone().requires_grad_()), want, strict=True):
        assert relative_error(got, exact) < (0.03 if scaling is None else 0.2)


@pytest.mark.parametrize("scaling", [*SCALINGS, None])
def test_no_rows(scaling):
    layer, x = linear(scaling), torch.zeros(0, 128).requires_grad_()
    dx, dw = torch.autograd.grad(layer(x).sum(), (x, layer.weight), create_graph=True)
    (dx.sum() + dw.square().sum()).backward()
    assert x.grad.shape == (0, 128) and layer.weight.grad.eq(0).all()


class Conv1D(nn.Module):
    """transformers' layer of this name, which ``convert`` knows by it."""

    def __init__(self, n_out, n_in):
        super().__init__()
        self.weight = nn.Parameter(values(n_in, n_out) / n_in**0.5)
        self.bias = nn.Parameter(torch.zeros(n_out))


Conv1D.__module__ = "transformers.pytorch_utils"


@pytest.mark.parametrize("scaling", [*SCALINGS, None])
def test_conv1d(scaling):
    layer = convert(Conv1D(64, 128), scaling)
    assert type(layer) is LowPrecisionConv1D
    x, b = values(32, 128).requires_grad_(), values(128, 64, seed=3)
    dx, dw = torch.autograd.grad(layer(x).square().sum(), (x, layer.weight), create_graph=True)
    ((dx * x.detach()).sum() + (dw * b).sum()).backward()
    other, weight = x.detach().clone().requires_grad_(), layer.weight.detach().clone().requires_grad_()
    wx, ww = torch.autograd.grad((other @ weight).square().sum(), (other, weight), create_graph=True)
    ((wx * other.detach()).sum() + (ww * b).sum()).backward()
    bound = 0.3 if scaling == "nvfp4" else 0.08
    assert relative_error(x.grad, other.grad) < bound and relative_error(layer.weight.grad, weight.grad) < bound


@pytest.mark.parametrize("scaling", ["delayed", "current", None])
@pytest.mark.parametrize("stored", ["fp16 as bf16", "fp16 as fp32", "fp8 as bf16", "fp8 as fp32", "bf16"])
def test_weights_in_low_bit_storage_are_part_of_the_graph(stored, scaling):
    layer = linear(scaling, bias=False)
    reads_as = torch.float32 if stored.endswith("fp32") else HALF
    if stored == "bf16":
        layer.weight.data = layer.weight.data.bfloat16()
    else:
        kind = Fp16Weight.from_float if stored.startswith("fp16") else Fp8Weight.from_float
        made = kind(layer.weight.data, *(() if kind == Fp16Weight.from_float else (E4M3,)), reads_as)
        layer.weight = nn.Parameter(made)
    exact = layer.weight.detach().to(torch.float32, copy=True) if stored == "bf16" else layer.weight.dequantize(
        torch.float32
    )  # fmt: skip
    x, a, dy = values(32, 128).requires_grad_(), values(32, 128, seed=3), values(32, 64, seed=2).requires_grad_()
    (dx,) = torch.autograd.grad(layer(x), x, dy, create_graph=True)
    gw, gdy = torch.autograd.grad((dx * a).sum(), (layer.weight, dy))
    assert relative_error(gw, dy.detach().t() @ a) < HALF_BOUND
    assert relative_error(gdy, a @ exact.detach().t()) < HALF_BOUND


class Block(nn.Module):
    """q, k and v read one tensor; with ``apart`` each reads a copy of its own."""

    def __init__(self, apart=False):
        super().__init__()
        torch.manual_seed(0)
        self.q, self.k, self.v, self.out = (nn.Linear(32, 32) for _ in range(4))
        self.apart = apart

    def forward(self, x):
        q, k, v = (layer(x.clone() if self.apart else x) for layer in (self.q, self.k, self.v))
        return self.out(torch.tanh(q * k + v))


def penalized(block, x, run=None, on=None):
    """Gradients of the squared norm of the gradients, of all of them or of those that ``on`` names."""
    leaf = x.clone().requires_grad_()
    h = torch.tanh(leaf)
    of = {"x": leaf, **dict(block.named_parameters())}
    loss = (run or block)(h).float().square().sum()
    chosen = [of[n] for n in on] if on else list(of.values())
    grads = torch.autograd.grad(loss, chosen, create_graph=True)
    return torch.autograd.grad(sum(g.square().sum() for g in grads), list(of.values()), allow_unused=True)


@pytest.mark.parametrize("on", [None, ["x"], ["k.weight"], ["q.weight", "v.bias"], ["out.weight", "x"]], ids=str)
@pytest.mark.parametrize("scaling", ["delayed", "blockwise"])
def test_readers_of_a_shared_input(scaling, on):
    got, want = (penalized(convert(Block(apart), scaling), values(16, 32), on=on) for apart in (False, True))
    plain = penalized(Block(), values(16, 32), on=on)
    for g, w, p in zip(got, want, plain, strict=True):
        assert (g is None) == (w is None) == (p is None)
        assert g is None or torch.allclose(g, w, rtol=1e-4, atol=1e-4 * float(w.abs().max()))
        assert g is None or float(p.norm()) < 1e-4 or relative_error(g, p) < 0.25


@pytest.mark.parametrize("scaling", ["delayed", "blockwise"])
def test_recomputed_activations(scaling):
    want = penalized(convert(Block(), scaling), values(16, 32))
    block = convert(Block(), scaling)
    got = penalized(block, values(16, 32), lambda h: checkpoint(block, h, use_reentrant=False))
    torch.testing.assert_close(got, want)


def test_a_weight_that_was_changed_in_between_is_an_error():
    layer = linear("current")
    x = values(16, 128).requires_grad_()
    out = layer(x).sum()
    with torch.no_grad():
        layer.weight.mul_(2)
    torch.autograd.grad(out, x, retain_graph=True)  # of the weight as it was quantized
    with pytest.raises(RuntimeError, match="changed in place"):
        torch.autograd.grad(out, x, create_graph=True)


@pytest.mark.parametrize("rows", [16, 5])
def test_a_first_derivative_keeps_no_more_than_before(rows):
    """An empty tensor that leads to the input, beside the two quantized operands and their scales."""
    layer, kept = linear("current"), []
    x = values(rows, 128).requires_grad_() * 1
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        layer(x)
    sizes = sorted(t.untyped_storage().nbytes() for t in kept)
    assert sizes == [0, 4, 4, 16 * 128, 64 * 128]


@pytest.mark.parametrize("on", [None, ["k.weight"], ["x"]], ids=str)
@pytest.mark.parametrize("backward", [True, False])
def test_nothing_keeps_a_graph_alive(backward, on):
    block = convert(Block(), "current")
    held = []

    def run():
        leaf = values(16, 32).requires_grad_()
        held.append(ref(leaf))  # which every graph on it holds
        h = torch.tanh(leaf)
        of = {"x": leaf, **dict(block.named_parameters())}
        chosen = [of[n] for n in on] if on else list(of.values())
        grads = torch.autograd.grad(block(h).square().sum(), chosen, create_graph=True)
        held.extend(ref(g) for g in grads)
        if backward:
            sum(g.square().sum() for g in grads).backward()

    run()
    gc.collect()
    assert all(h() is None for h in held)

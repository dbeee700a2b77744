"""The reference GEMMs against float64: the noise of each way of scaling, and exactly which values it rounds to."""

import math

import numpy as np
import pytest
import torch
from numerics import nearest_even, sqnr
from torch import nn

from nemo_lowprec.chart.groups import LayerFilter
from nemo_lowprec.chart.recipe import Recipe
from nemo_lowprec.compute import ReferenceBackend, convert_layers
from nemo_lowprec.compute.operands import new_histories, operand_of
from nemo_lowprec.formats import BlockScaledMatrix, dequantize_blocks

# Rounding to a mantissa of m bits leaves about 6.02 m + 13.5 dB of a normal sample: 31.5 for E4M3, 25.5 for E5M2,
# and the noise of two operands adds up. E2M1 with E4M3 scales has about 20, less 3 where it rounds stochastically.
E4M3_E4M3 = (27.9, 29.2)
E4M3_E5M2 = (24.0, 25.2)
BOUNDS = {
    ("delayed", "hybrid"): (E4M3_E4M3, E4M3_E5M2, E4M3_E5M2),
    ("delayed", "e4m3"): (E4M3_E4M3, E4M3_E4M3, E4M3_E4M3),
    ("current", "hybrid"): (E4M3_E4M3, E4M3_E5M2, E4M3_E5M2),
    ("current", "e4m3"): (E4M3_E4M3, E4M3_E4M3, E4M3_E4M3),
    ("rowwise", "hybrid"): (E4M3_E4M3, E4M3_E5M2, E4M3_E5M2),
    ("rowwise", "e4m3"): (E4M3_E4M3, E4M3_E4M3, E4M3_E4M3),
    ("blockwise", "hybrid"): (E4M3_E4M3, E4M3_E5M2, E4M3_E5M2),
    ("blockwise", "e4m3"): (E4M3_E4M3, E4M3_E4M3, E4M3_E4M3),
    ("mxfp8", "e4m3"): (E4M3_E4M3, E4M3_E4M3, E4M3_E4M3),
    ("nvfp4", "e4m3"): ((16.2, 17.2), (14.6, 15.6), (15.0, 16.2)),
}
M, K, N = 192, 256, 128


def operands(seed=0, spread=0.0):
    """Input, weight and output gradient of a layer; ``spread`` gives rows and columns sizes of their own."""
    g = torch.Generator().manual_seed(seed)

    def draw(rows, cols, size):
        x = torch.randn(rows, cols, generator=g) * size
        x = (
            x
            * torch.exp(spread * torch.randn(rows, 1, generator=g))
            * torch.exp(spread * torch.randn(cols, generator=g))
        )
        return x.bfloat16().float()

    return draw(M, K, 1.0), draw(N, K, 0.02), draw(M, N, 1e-3)


def gemms(recipe, x, w, dy):
    """(output, grad_input, grad_weight) of a layer in FP32 on the reference backend."""
    layer = nn.Linear(K, N, bias=False)
    with torch.no_grad():
        layer.weight.copy_(w)
    model = nn.Sequential(layer)
    convert_layers(model, torch.bfloat16, recipe, ReferenceBackend(), None, LayerFilter(), new_histories(recipe))
    x = x.clone().requires_grad_()
    out = model(x)
    out.backward(dy)
    return out.detach(), x.grad, layer.weight.grad


@pytest.mark.parametrize(("scaling", "fp8"), BOUNDS)
def test_noise_of_each_gemm_is_its_formats(scaling, fp8):
    x, w, dy = operands()
    got = gemms(Recipe(scaling, fp8=fp8), x, w, dy)
    want = (x.double() @ w.double().t(), dy.double() @ w.double(), dy.double().t() @ x.double())
    for name, a, b, (low, high) in zip(("fprop", "dgrad", "wgrad"), got, want, BOUNDS[scaling, fp8], strict=True):
        assert low < sqnr(a, b) < high, f"{name}: {sqnr(a, b):.2f} dB"


def rounded(values, fmt, block):
    """``values`` as stored, in float64; ``block`` is (rows, columns, kind of scale) or None for one scale."""
    values = values.double().numpy()
    if block is None:
        scale = np.float32(fmt_max(fmt)) / np.float32(np.abs(values).max())
        return torch.tensor(nearest_even((values * scale).astype(np.float32), fmt) / float(scale))
    rows, cols, kind = block
    out = np.zeros_like(values)
    for i in range(0, values.shape[0], rows):
        for j in range(0, values.shape[1], cols):
            part = values[i : i + rows, j : j + cols]
            amax = np.abs(part).max()
            if kind == "down":  # the largest power of two that fits
                step = 2.0 ** -math.floor(math.log2(fmt_max(fmt) / amax))
            else:
                step = 2.0 ** math.ceil(math.log2(amax / fmt_max(fmt)))
            out[i : i + rows, j : j + cols] = nearest_even(part / step, fmt) * step
    return torch.tensor(out)


def fmt_max(fmt):
    return {"e4m3": 448.0, "e5m2": 57344.0}[fmt]


@pytest.mark.parametrize(
    ("scaling", "fp8", "vector", "square"),
    [
        ("delayed", "hybrid", None, None),
        ("current", "e4m3", None, None),
        ("rowwise", "e4m3", (1, 1 << 20, "down"), (1, 1 << 20, "down")),
        ("rowwise", "hybrid", (1, 1 << 20, "down"), (1, 1 << 20, "down")),
        ("blockwise", "e4m3", (1, 128, "down"), (128, 128, "down")),
        ("blockwise", "hybrid", (1, 128, "down"), (128, 128, "down")),
        ("mxfp8", "e4m3", (1, 32, "up"), (1, 32, "up")),
    ],
)
def test_each_gemm_multiplies_exactly_the_values_of_its_recipe(scaling, fp8, vector, square):
    x, w, dy = operands(1, spread=1.0)
    out, dx, dw = gemms(Recipe(scaling, fp8=fp8), x, w, dy)
    grad = "e5m2" if fp8 == "hybrid" else "e4m3"

    def side(values, fmt, block):
        """Rounded in blocks along the last dimension, and in blocks along the first."""
        return rounded(values, fmt, block), rounded(values.t(), fmt, block).t()

    (x_row, x_col), (w_row, w_col) = side(x, "e4m3", vector), side(w, "e4m3", square)
    dy_row, dy_col = side(dy, grad, vector)
    # What is left is the FP32 accumulation.
    assert sqnr(out, x_row @ w_row.t()) > 120
    assert sqnr(dx, dy_row @ w_col) > 120
    assert sqnr(dw, dy_col.t() @ x_col) > 120


@pytest.mark.parametrize("kind", ["input", "grad_output", "weight"])
def test_nvfp4_rotates_both_operands_of_wgrad_by_hadamard_matrices_of_16(kind):
    x = operands(4, spread=1.0)[0]
    recipe, backend = Recipe("nvfp4", fp8="e4m3"), ReferenceBackend()
    part = backend.quantize(x, operand_of(recipe, kind), rowwise=False, columnwise=True, record=False).columnwise
    got = dequantize_blocks(BlockScaledMatrix(part.data, part.scale_inv, part.layout)).double()
    signs = [[(-1) ** (i & j).bit_count() for j in range(16)] for i in range(16)]
    rotation = torch.tensor(signs, dtype=torch.float64) / 4  # orthogonal: it cancels in the product
    assert torch.equal(rotation @ rotation.t(), torch.eye(16, dtype=torch.float64))
    turned = (x.t().double().reshape(-1, 16) @ rotation).view(K, M)
    same, other = (x.t(), turned) if kind == "weight" else (turned, x.t())
    assert sqnr(got, same) > 15 and sqnr(got, other) < 3


def test_nvfp4_weights_are_rounded_once_for_both_gemms_and_gradients_at_random():
    x, w, dy = operands(2)
    torch.manual_seed(0)
    out, dx, dw = gemms(Recipe("nvfp4", fp8="e4m3"), x, w, dy)
    torch.manual_seed(1)
    again, dx2, dw2 = gemms(Recipe("nvfp4", fp8="e4m3"), x, w, dy)
    torch.manual_seed(0)
    repeated = gemms(Recipe("nvfp4", fp8="e4m3"), x, w, dy)
    assert torch.equal(out, again) and not torch.equal(dx, dx2) and not torch.equal(dw, dw2)
    assert all(torch.equal(a, b) for a, b in zip((out, dx, dw), repeated, strict=True))
    mean = torch.stack([gemms(Recipe("nvfp4", fp8="e4m3"), x, w, dy)[1] for _ in range(16)]).mean(0)
    # Unbiased: averaging leaves the noise of the weights alone.
    assert sqnr(mean, dy.double() @ w.double()) > sqnr(dx, dy.double() @ w.double()) + 3


def test_delayed_scaling_multiplies_with_the_scales_of_the_history():
    recipe = Recipe("delayed", fp8_margin=1, fp8_amax_history_len=4)
    layer = nn.Linear(K, N, bias=False)
    model, histories = nn.Sequential(layer), new_histories(recipe)
    convert_layers(model, torch.bfloat16, recipe, ReferenceBackend(), None, LayerFilter(), histories)
    x, w, dy = operands(3)
    with torch.no_grad():
        layer.weight.copy_(w)
    model(4 * x).backward(dy)
    histories.update()
    scale_x = np.float32(448) / np.float32(4 * x.abs().max().item()) / 2
    scale_w = np.float32(448) / np.float32(w.abs().max().item()) / 2
    want = [
        nearest_even((v.double().numpy() * s).astype(np.float32), "e4m3") / s for v, s in ((x, scale_x), (w, scale_w))
    ]
    assert sqnr(model(x).detach(), torch.tensor(want[0]) @ torch.tensor(want[1]).t()) > 120


@pytest.mark.parametrize("scaling", ["delayed", "current", "rowwise", "blockwise", "mxfp8", "nvfp4"])
@pytest.mark.parametrize("size", [1e-6, 1e6])
def test_gradients_and_inputs_of_any_size_keep_their_precision(scaling, size):
    x, w, dy = operands()
    out, dx, dw = gemms(Recipe(scaling, fp8="e4m3"), x * size, w, dy * size)
    floor = 14 if scaling == "nvfp4" else 27
    assert sqnr(out, size * x.double() @ w.double().t()) > floor
    assert sqnr(dx, size * dy.double() @ w.double()) > floor
    assert sqnr(dw, size**2 * dy.double().t() @ x.double()) > floor

"""Block-scaled tensors against slow loops in float64, written from the papers."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numerics import nearest_even

from nemo_lowprec.formats import E4M3, E5M2, BlockScaledMatrix, dequantize_blocks, quantize_blocks
from nemo_lowprec.formats.gemm_block_scaling import MX_32, NVFP4_ROW_16, NVFP4_SQUARE_16, ROW_128, SQUARE_128

POW2 = {"row128": ROW_128, "square128": SQUARE_128, "mx32": MX_32}
NVFP4 = {"nvfp4_row": NVFP4_ROW_16, "nvfp4_square": NVFP4_SQUARE_16}
LAYOUTS = POW2 | NVFP4
SHAPES = [(3, 300), (2, 128), (130, 140), (1, 1), (17, 33)]


def blocks(shape, layout):
    for top in range(0, shape[0], layout.rows):
        for left in range(0, shape[1], layout.cols):
            yield (
                (top // layout.rows, left // layout.cols),
                (slice(top, top + layout.rows), slice(left, left + layout.cols)),
            )


def by_hand(values, fmt, layout):
    """(values after quantization, scale_inv a block), in float64."""
    out = np.zeros(values.shape)
    scales = np.zeros((-(-values.shape[0] // layout.rows), -(-values.shape[1] // layout.cols)))
    fp4_tensor_scale = np.float32(448 * 6) / np.float32(np.abs(values).max() or 448 * 6)
    for position, place in blocks(values.shape, layout):
        block = values[place]
        amax = np.abs(block).max()
        if layout.scale == "e4m3":
            scale_inv = float(nearest_even(amax / 6 * fp4_tensor_scale, "e4m3")) / fp4_tensor_scale
            scaled = block / scale_inv if scale_inv else np.zeros_like(block)
            out[place] = nearest_even(scaled, "e2m1") * scale_inv
        else:
            if amax == 0:
                exponent = -127 if layout.scale == "e8m0" else 0
            elif layout.scale == "e8m0":
                exponent = max(math.ceil(math.log2(np.float32(amax) / np.float32(fmt.max))), -127)
            else:
                exponent = -math.floor(math.log2(np.float32(fmt.max) / np.float32(amax)))
            scale_inv = 2.0**exponent
            out[place] = nearest_even(block / scale_inv, fmt.name) * scale_inv
        scales[position] = scale_inv
    return out, scales


def sample(shape, seed=0):
    """Rows and columns of very different sizes, and some zeros."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=g)
    x = x * torch.exp(3 * torch.randn(shape[0], 1, generator=g)) * torch.exp(torch.randn(1, shape[1], generator=g))
    return torch.where(torch.rand(shape, generator=g) < 0.1, torch.zeros(()), x)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=lambda f: f.name)
@pytest.mark.parametrize("layout", POW2)
def test_power_of_two_blocks_equal_the_float64_loop_exactly(layout, fmt, shape):
    x = sample(shape)
    got = quantize_blocks(x, fmt, POW2[layout])
    want, scales = by_hand(x.double().numpy(), fmt, POW2[layout])
    np.testing.assert_array_equal(got.scale_inv.double().numpy(), scales)
    np.testing.assert_array_equal(dequantize_blocks(got).double().numpy(), want)
    assert got.data.dtype == fmt.dtype and got.data.shape == shape


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("layout", NVFP4)
def test_nvfp4_equals_the_float64_loop(layout, shape):
    x = sample(shape)
    got = quantize_blocks(x, E4M3, NVFP4[layout])
    want, scales = by_hand(x.double().numpy(), E4M3, NVFP4[layout])
    np.testing.assert_allclose(got.scale_inv.double().numpy(), scales, rtol=1e-6)
    np.testing.assert_allclose(dequantize_blocks(got).double().numpy(), want, rtol=1e-6)
    assert set(got.data.abs().unique().tolist()) <= {0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0}


@pytest.mark.parametrize(
    ("amax", "layout", "scale_inv"),
    [
        (448.0, ROW_128, 1.0),
        (449.0, ROW_128, 2.0),
        (224.0, ROW_128, 0.5),
        (225.0, ROW_128, 1.0),
        (448.0, MX_32, 1.0),
        (448.5, MX_32, 2.0),
        (224.0, MX_32, 0.5),
        (0.0, ROW_128, 1.0),
        (0.0, MX_32, 2.0**-127),
        (float("inf"), ROW_128, 1.0),
        (float("inf"), MX_32, 2.0**127),
    ],
)
def test_scale_of_a_block_by_its_amax(amax, layout, scale_inv):
    x = torch.zeros(1, 8)
    x[0, 3] = -amax
    assert quantize_blocks(x, E4M3, layout).scale_inv.item() == scale_inv


@pytest.mark.parametrize("layout", POW2)
def test_power_of_two_scales_change_no_value_that_is_stored_already(layout):
    once = dequantize_blocks(quantize_blocks(sample((40, 200)), E4M3, POW2[layout]))
    again = dequantize_blocks(quantize_blocks(once, E4M3, POW2[layout]))
    assert torch.equal(once, again)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_zero_blocks_stay_zero_beside_any_others(layout):
    size = LAYOUTS[layout].cols
    for other in (1.0, 1e-37, 1e30):
        x = torch.zeros(LAYOUTS[layout].rows + 1, 2 * size)
        x[0, :size] = other
        got = dequantize_blocks(quantize_blocks(x, E4M3, LAYOUTS[layout]))
        assert torch.equal(got[x == 0], x[x == 0])
        assert torch.equal(dequantize_blocks(quantize_blocks(0 * x, E4M3, LAYOUTS[layout])), 0 * x)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("scale", [1e-30, 1e-20, 1.0, 1e20, 1e36])
def test_blocks_of_any_magnitude_keep_their_precision(layout, scale):
    x = sample((32, 256)).clamp(-4, 4)
    got = dequantize_blocks(quantize_blocks(x * scale, E4M3, LAYOUTS[layout]))
    assert torch.isfinite(got).all()
    error = (got / scale - x).norm() / x.norm()
    assert error < (0.15 if layout in NVFP4 else 0.03)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_nan_stays_nan_and_other_blocks_are_untouched(layout):
    size = LAYOUTS[layout].cols
    x = torch.ones(1, 3 * size)
    x[0, 1] = float("nan")
    got = dequantize_blocks(quantize_blocks(x, E4M3, LAYOUTS[layout]))
    assert got[0, 1].isnan()
    # NVFP4's scale of the whole tensor falls back to 1, and a block's is rounded to E4M3.
    torch.testing.assert_close(got[:, size:], x[:, size:], rtol=2**-4 if layout in NVFP4 else 0, atol=0)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_infinity_saturates_and_makes_no_nan(layout):
    size = LAYOUTS[layout].cols
    x = torch.ones(1, 2 * size)
    x[0, 1], x[0, 2] = float("inf"), -float("inf")
    got = dequantize_blocks(quantize_blocks(x, E4M3, LAYOUTS[layout]))
    assert not got.isnan().any()
    assert got[0, 1] >= 448 and got[0, 2] <= -448
    torch.testing.assert_close(got[:, size:], x[:, size:], rtol=2**-4 if layout in NVFP4 else 0, atol=0)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", [(0, 128), (4, 0), (0, 0)])
def test_no_elements(layout, shape):
    got = quantize_blocks(torch.empty(shape), E4M3, LAYOUTS[layout])
    assert dequantize_blocks(got).shape == shape


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_input_is_quantized_as_its_fp32_values(layout, dtype):
    x = sample((5, 70)).clamp(-1e4, 1e4).to(dtype)
    got, want = quantize_blocks(x, E4M3, LAYOUTS[layout]), quantize_blocks(x.float(), E4M3, LAYOUTS[layout])
    assert torch.equal(dequantize_blocks(got), dequantize_blocks(want))


def test_a_square_block_is_the_same_seen_from_both_sides():
    x = sample((150, 260))
    for layout in (SQUARE_128, NVFP4_SQUARE_16):
        row = dequantize_blocks(quantize_blocks(x, E4M3, layout))
        column = dequantize_blocks(quantize_blocks(x.t(), E4M3, layout)).t()
        assert torch.equal(row, column)


def test_stochastic_rounding_is_unbiased_and_stays_between_the_neighbours():
    x = torch.full((400, 16), 2.3)
    x[:, 0] = 6.0  # so that the scale of every block is the same
    generator = torch.Generator().manual_seed(0)
    got = dequantize_blocks(quantize_blocks(x, E4M3, NVFP4_ROW_16, generator))[:, 1:]
    assert sorted(got.unique().tolist()) == pytest.approx([2.0, 3.0])
    assert got.mean().item() == pytest.approx(2.3, abs=0.02)
    nearest = dequantize_blocks(quantize_blocks(x, E4M3, NVFP4_ROW_16))[:, 1:]
    assert nearest.unique().tolist() == pytest.approx([2.0])


def test_stochastic_rounding_repeats_with_its_generator_and_keeps_exact_values():
    def draw(x, seed):
        return quantize_blocks(x, E4M3, NVFP4_ROW_16, torch.Generator().manual_seed(seed)).data

    x = sample((20, 32))
    assert torch.equal(draw(x, 1), draw(x, 1)) and not torch.equal(draw(x, 1), draw(x, 2))
    exact = torch.tensor([[0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, -6.0]])
    assert torch.equal(draw(exact, 1), exact)


def test_dequantize_reads_nothing_but_data_and_scales():
    data = torch.tensor([[1.0, 2.0], [4.0, -8.0]]).to(torch.float8_e4m3fn)
    got = dequantize_blocks(BlockScaledMatrix(data, torch.tensor([[2.0], [0.5]]), ROW_128))
    assert got.tolist() == [[2.0, 4.0], [2.0, -4.0]]


FLOATS = st.floats(-(2.0**100), 2.0**100, width=32) | st.floats(-1, 1, width=32)


@settings(max_examples=60, deadline=None)
@given(st.data(), st.sampled_from(sorted(POW2)), st.sampled_from([E4M3, E5M2]))
def test_any_small_matrix_equals_the_float64_loop(data, layout, fmt):
    rows, cols = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 40))
    x = np.array(data.draw(st.lists(FLOATS, min_size=rows * cols, max_size=rows * cols))).reshape(rows, cols)
    x[np.abs(x) < 2.0**-100] = 0  # FP32 subnormals after scaling are not what this is about
    got = quantize_blocks(torch.tensor(x, dtype=torch.float32), fmt, POW2[layout])
    want, _ = by_hand(x, fmt, POW2[layout])
    np.testing.assert_array_equal(dequantize_blocks(got).double().numpy(), want)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(-1e4, 1e4, width=32), min_size=1, max_size=48))
def test_nvfp4_error_is_bounded_by_the_blocks_amax(values):
    x = torch.tensor([values])
    got = dequantize_blocks(quantize_blocks(x, E4M3, NVFP4_ROW_16))
    for left in range(0, len(values), 16):
        block, amax = x[:, left : left + 16], x[:, left : left + 16].abs().max()
        # Half the widest step (4 to 6) plus the error of the block's E4M3 scale, whose subnormals end at 2**-9.
        bound = amax / 6 * (1 + 1 / 16) + x.abs().max() * 2.0**-10 / 448 * 6 + 2.0**-126
        assert (got[:, left : left + 16] - block).abs().max() <= bound

"""Blocks of 128 elements of a row with power-of-two scales, against their definition in float64."""

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from numerics import nearest_even

from nemo_lowprec.formats import E4M3, FP16
from nemo_lowprec.formats.block_scale_128 import block_exponent, block_grid, dequantize_rows, quantize_rows

FORMATS = pytest.mark.parametrize("fmt", [E4M3, FP16], ids=lambda f: f.name)
FLOATS = st.floats(width=32, allow_nan=False, allow_infinity=False)
LARGEST = np.finfo(np.float32).max


def smallest_exponent(amax, fmt):
    """The smallest exponent e in [27, 254] such that amax * 2**(127 - e) is inside the format; 127 for zero."""
    fits = np.asarray(amax, np.float64)[..., None] * 2.0 ** (127 - np.arange(27, 255)) <= fmt.max
    return np.where(np.asarray(amax) > 0, 27 + fits.argmax(-1), 127)


def nearest(values, fmt):
    with np.errstate(invalid="ignore"):
        return nearest_even(values, "e4m3") if fmt is E4M3 else values.astype(np.float16).astype(np.float64)


def by_definition(values, fmt):
    """Exponents and rounded values, block by block."""
    values = np.asarray(values, np.float64)
    rows = values.reshape(values.shape[0] if values.ndim > 1 else 1, -1)
    exponents, rounded = [], []
    for start in range(0, rows.shape[1], 128):
        block = np.where(np.isfinite(rows), rows, np.nan)[:, start : start + 128]
        exponent = smallest_exponent(np.nan_to_num(np.abs(block)).max(1), fmt)
        scale = 2.0 ** (127 - exponent)[:, None]
        exponents.append(exponent)
        rounded.append(nearest(block * scale, fmt) / scale)
    return np.stack(exponents, 1), np.concatenate(rounded, 1).reshape(values.shape)


def assert_as_defined(values, fmt):
    data, exponent = quantize_rows(values, fmt)
    want_exponent, want = by_definition(values.float().numpy(), fmt)
    assert data.dtype == fmt.dtype and data.shape == values.shape and exponent.dtype == torch.uint8
    np.testing.assert_array_equal(exponent.numpy(), want_exponent)
    got = dequantize_rows(data, exponent)
    assert got.dtype == torch.float32 and got.shape == values.shape
    with np.errstate(over="ignore"):  # the largest FP32 numbers round up to infinity
        np.testing.assert_array_equal(got.numpy(), want.astype(np.float32))


def spread(shape, seed=0, binades=40):
    """Values over many binades, so that a block holds all of the format: ties, subnormals and zeros."""
    generator = torch.Generator().manual_seed(seed)
    power = torch.randint(-binades // 2, binades // 2, shape, generator=generator).float()
    return torch.randn(shape, generator=generator) * torch.exp2(power)


def bits(tensor):
    return tensor.contiguous().view(torch.uint8 if tensor.element_size() == 1 else torch.int32)


@FORMATS
def test_exponents_at_the_steps_and_one_ulp_around_them(fmt):
    steps = np.float32(fmt.max * 2.0 ** np.arange(-157, 112 if fmt is FP16 else 119))
    one_up, one_down = np.nextafter(steps, LARGEST), np.nextafter(steps, np.float32(0))
    ends = np.float32([0.0, 1e-45, 1e-42, np.finfo(np.float32).tiny, 1.0, LARGEST])
    amax = np.concatenate([steps, one_up, one_down, ends])
    got = block_exponent(torch.from_numpy(amax), fmt).numpy()
    np.testing.assert_array_equal(got, smallest_exponent(amax, fmt))
    assert got.min() == 27
    assert got[np.isin(amax, steps[157])].tolist() == [127] and got[np.isin(amax, one_up[157])].tolist() == [128]


@FORMATS
@settings(max_examples=200, deadline=None)
@given(st.lists(FLOATS.map(abs), min_size=1, max_size=20))
def test_exponents_of_any_magnitudes(fmt, amax):
    amax = np.array(amax, np.float32)
    np.testing.assert_array_equal(block_exponent(torch.from_numpy(amax), fmt).numpy(), smallest_exponent(amax, fmt))


@FORMATS
@settings(max_examples=150, deadline=None)
@given(st.lists(FLOATS, min_size=1, max_size=10))
@example([float(LARGEST), 1.0])
def test_any_values_round_to_nearest_even(fmt, values):
    assert_as_defined(torch.tensor(values), fmt)


@FORMATS
@pytest.mark.parametrize("power", [-120, -60, 0, 60, 110])
def test_ties_go_to_the_even_neighbour(fmt, power):
    points = torch.arange(0, 448, 2**-4).view(-1, 64)  # on, half way and a quarter of the way between neighbours
    top = torch.full((len(points), 1), fmt.max)
    assert_as_defined(torch.ldexp(torch.cat([points, top], 1), torch.tensor(power)), fmt)


@FORMATS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "shape", [(), (1,), (127,), (300,), (3, 128), (2, 129), (5, 3), (3, 5, 7, 9), (2, 3, 128), (1, 257), (130, 1)]
)
def test_any_shape_is_cut_into_blocks_of_its_rows(fmt, dtype, shape):
    values = spread(shape, binades=20).to(dtype)
    assert_as_defined(values, fmt)
    rows = shape[0] if len(shape) > 1 else 1
    blocks = -(-values.numel() // rows // 128)
    assert quantize_rows(values, fmt)[1].shape == (rows, blocks)
    assert block_grid(shape) == (rows, values.numel() // rows, blocks)


@FORMATS
@pytest.mark.parametrize("shape", [(0,), (0, 4), (4, 0), (0, 0), (2, 0, 3)])
def test_empty_tensors_stay_empty(fmt, shape):
    data, exponent = quantize_rows(torch.zeros(shape), fmt)
    assert data.shape == shape and data.dtype == fmt.dtype and exponent.numel() == 0
    assert dequantize_rows(data, exponent).shape == shape


@FORMATS
def test_memory_layout_of_the_source_is_not_seen(fmt):
    for values in (spread((256, 128)).t(), spread((200, 300))[::2, 5:140], spread((4, 3, 5, 128)).permute(0, 3, 1, 2)):
        data, exponent = quantize_rows(values, fmt)
        want, want_exponent = quantize_rows(values.contiguous(), fmt)
        assert data.is_contiguous() and torch.equal(data.float(), want.float()) and torch.equal(exponent, want_exponent)


@FORMATS
@pytest.mark.parametrize("shape", [(12, 300), (8, 128), (7, 3, 50)])
def test_slices_of_the_first_dimension_quantize_to_the_same_bytes(fmt, shape):
    values = spread(shape)
    data, exponent = quantize_rows(values, fmt)
    for part in (slice(0, 1), slice(2, 7), slice(5, None)):
        got, got_exponent = quantize_rows(values[part], fmt)
        assert torch.equal(got.view(torch.uint8), data[part].view(torch.uint8))
        assert torch.equal(got_exponent, exponent[part])
        assert torch.equal(dequantize_rows(got, got_exponent), dequantize_rows(data, exponent)[part])


@FORMATS
def test_elements_that_are_not_finite_become_nan_and_leave_the_others_as_without_them(fmt):
    values = spread((4, 300))
    holes = torch.zeros(values.shape, dtype=torch.bool)
    holes[0, 3] = holes[0, 200] = holes[1, 0] = holes[2, 299] = True
    holes[3, 128:256] = True  # a block of nothing else
    bad = values.clone()
    bad[holes] = torch.tensor([float("inf"), -float("inf"), float("nan")]).repeat(44)[: int(holes.sum())]
    data, exponent = quantize_rows(bad, fmt)
    want, want_exponent = quantize_rows(values.masked_fill(holes, 0.0), fmt)
    assert torch.equal(exponent, want_exponent) and exponent[3, 1] == 127
    got = dequantize_rows(data, exponent)
    assert torch.equal(got.isnan(), holes) and not got.isinf().any()
    assert torch.equal(got[~holes], dequantize_rows(want, want_exponent)[~holes])


def test_zeros_have_the_scale_one_and_stay_zeros():
    data, exponent = quantize_rows(torch.zeros(2, 200), E4M3)
    assert exponent.unique().tolist() == [127] and data.view(torch.uint8).count_nonzero() == 0


@FORMATS
@pytest.mark.parametrize("scale", [1e-36, 1e-30, 1.0, 1e27])
def test_quantizing_what_was_read_changes_no_value(fmt, scale):
    values = spread((64, 333)) * scale
    values[0, :128] = 225.0 * scale  # rounds down to half of the largest value, which a smaller exponent holds too
    once = dequantize_rows(*quantize_rows(values, fmt))
    data, exponent = quantize_rows(once, fmt)
    assert torch.equal(bits(dequantize_rows(data, exponent)), bits(once))
    again, exponent_again = quantize_rows(dequantize_rows(data, exponent), fmt)
    assert torch.equal(again.view(torch.uint8), data.view(torch.uint8)) and torch.equal(exponent_again, exponent)


@pytest.mark.parametrize("fmt, half_ulp, reach", [(E4M3, 2**-4, 2.0**-17), (FP16, 2**-11, 2.0**-39)])
@pytest.mark.parametrize("scale", [1e-20, 1e-9, 1.0, 1e20])
def test_error_is_half_an_ulp_down_to_a_fixed_part_of_the_largest(fmt, half_ulp, reach, scale):
    values = (spread((64, 256), binades=60) * scale).double()
    error = (dequantize_rows(*quantize_rows(values.float(), fmt)).double() - values.float().double()).abs()
    amax = values.float().double().abs().view(64, 2, 128).amax(-1, keepdim=True).expand(64, 2, 128).reshape(64, 256)
    assert (error <= torch.maximum(values.abs() * half_ulp * (1 + 2**-20), amax * reach)).all()

"""The cast into 8-bit floats and back, against an independent computation in float64."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numerics import LAYOUT, grid, nearest_even, value_of

from nemo_lowprec.formats import E4M3, E5M2, cast, decode

FORMATS = pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=lambda f: f.name)


def roundtrip(values: np.ndarray, fmt) -> np.ndarray:
    return decode(cast(torch.tensor(values, dtype=torch.float32), fmt)).double().numpy()


@FORMATS
def test_decode_is_exact_for_every_code(fmt):
    got = decode(torch.arange(256, dtype=torch.uint8).view(fmt.dtype))
    assert got.dtype == torch.float32
    np.testing.assert_array_equal(got.numpy(), np.array([value_of(c, fmt.name) for c in range(256)], dtype=np.float32))


@FORMATS
def test_max_is_the_largest_finite_value(fmt):
    assert fmt.max == grid(fmt.name)[-1]


@FORMATS
def test_cast_keeps_every_representable_value(fmt):
    values = np.concatenate([grid(fmt.name), -grid(fmt.name)])
    np.testing.assert_array_equal(roundtrip(values, fmt), values)


@FORMATS
def test_cast_rounds_midpoints_to_even_and_their_neighbours_to_nearest(fmt):
    levels = grid(fmt.name)
    middle = ((levels[1:] + levels[:-1]) / 2).astype(np.float32)  # exact in FP32
    values = np.concatenate([middle, np.nextafter(middle, np.float32(0)), np.nextafter(middle, np.float32(1e9))])
    values = np.concatenate([values, -values]).astype(np.float64)
    np.testing.assert_array_equal(roundtrip(values, fmt), nearest_even(values, fmt.name))


@FORMATS
def test_cast_saturates_and_keeps_nan(fmt):
    values = np.array([fmt.max, fmt.max * 1.04, fmt.max * 2, 3e38, np.inf])
    np.testing.assert_array_equal(roundtrip(values, fmt), np.full(5, fmt.max))
    np.testing.assert_array_equal(roundtrip(-values, fmt), np.full(5, -fmt.max))
    assert np.isnan(roundtrip(np.array([np.nan, -np.nan]), fmt)).all()
    mixed = roundtrip(np.array([1.0, np.nan, np.inf, -2.0]), fmt)
    np.testing.assert_array_equal(mixed, [1.0, np.nan, fmt.max, -2.0])


@FORMATS
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_cast_takes_any_float_dtype(fmt, dtype):
    values = torch.linspace(-500, 500, 1001).to(dtype)
    got = decode(cast(values, fmt)).double().numpy()
    np.testing.assert_array_equal(got, nearest_even(values.double().numpy(), fmt.name))


@FORMATS
@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.floats(width=32, allow_nan=True, allow_infinity=False, allow_subnormal=True), min_size=1, max_size=8)
)
def test_cast_of_any_float_is_the_nearest_even_value(fmt, values):
    values = np.array(values)
    np.testing.assert_array_equal(roundtrip(values, fmt), nearest_even(values, fmt.name))


@FORMATS
@settings(max_examples=60, deadline=None)
@given(st.floats(min_value=-20, max_value=4), st.booleans())
def test_cast_near_and_below_the_smallest_value_is_the_nearest_even_value(fmt, log2, negative):
    values = np.array([np.float32((-1) ** negative * 2.0**log2)], dtype=np.float64)
    np.testing.assert_array_equal(roundtrip(values, fmt), nearest_even(values, fmt.name))


@FORMATS
def test_round_trip_error_is_within_the_formats_half_step(fmt):
    values = torch.randn(4096, generator=torch.Generator().manual_seed(0)).double().numpy()
    values = values[np.abs(values) >= 2.0**-6]  # normal in both formats
    relative = np.abs(roundtrip(values, fmt) - values) / np.abs(values)
    half_step = 2.0 ** -(LAYOUT[fmt.name][1] + 1)
    assert half_step / 2 < relative.max() <= half_step


@FORMATS
@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (0, 4), (2, 3, 4)])
def test_shapes_without_elements_and_without_dimensions(fmt, shape):
    got = decode(cast(torch.full(shape, 1.5), fmt))
    assert got.shape == shape and bool((got == 1.5).all())


@FORMATS
def test_decode_of_a_transposed_tensor_keeps_positions(fmt):
    data = cast(torch.arange(6.0).view(2, 3), fmt).t()
    assert torch.equal(decode(data), torch.arange(6.0).view(2, 3).t())

"""Per-tensor scales: Transformer Engine's formula."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_lowprec.formats import E4M3, E5M2, cast, compute_amax, compute_scale, decode, power_of_two_scale

FP32_MAX = torch.finfo(torch.float32).max


def scale(amax, fp_max=448.0, margin=0, previous=None):
    previous = None if previous is None else torch.tensor([previous])
    return compute_scale(torch.tensor([float(amax)]), fp_max, margin, previous).item()


@pytest.mark.parametrize(
    ("amax", "fp_max", "margin", "want"),
    [
        (448.0, 448.0, 0, 1.0),
        (1.0, 448.0, 0, 448.0),
        (10.0, 448.0, 0, 44.8),  # not rounded to a power of two
        (1.0, 448.0, 1, 224.0),
        (1.0, 448.0, -2, 1792.0),
        (57344.0, 57344.0, 0, 1.0),
        (0.5, 57344.0, 3, 14336.0),
        (10000.0, 448.0, 0, 0.0448),
    ],
)
def test_scale_is_max_over_amax_over_two_to_the_margin(amax, fp_max, margin, want):
    assert scale(amax, fp_max, margin) == pytest.approx(want, rel=1e-7)


@pytest.mark.parametrize("amax", [0.0, float("inf"), float("nan"), -1.0])
def test_unusable_amax_keeps_the_scale_and_is_one_at_first(amax):
    assert scale(amax, previous=3.5) == 3.5
    assert scale(amax) == 1.0


def test_scales_are_divided_once_in_fp32():
    amaxes = torch.rand(2000, generator=torch.Generator().manual_seed(0))
    want = torch.tensor([448.0]).div(amaxes)
    assert torch.equal(compute_scale(amaxes, 448.0), want)
    assert torch.equal(compute_scale(amaxes, torch.full((2000,), 448.0)), want)


def test_scale_of_a_tiny_amax_stays_finite():
    assert scale(1e-40) == FP32_MAX
    assert scale(1e-40, previous=2.0) == FP32_MAX


def test_scales_of_many_tensors_are_computed_elementwise():
    got = compute_scale(torch.tensor([1.0, 0.0, 2.0]), torch.tensor([448.0, 448.0, 57344.0]), 0, torch.full((3,), 9.0))
    assert got.tolist() == [448.0, 9.0, 28672.0]


@settings(max_examples=100, deadline=None)
@given(st.floats(min_value=2.0**-100, max_value=2.0**100, width=32), st.sampled_from([E4M3, E5M2]), st.integers(0, 3))
def test_scaled_amax_fills_the_format_and_never_overflows(amax, fmt, margin):
    s = scale(amax, fmt.max, margin)
    assert math.isclose(s * amax, fmt.max / 2**margin, rel_tol=1e-6)
    largest = decode(cast(torch.tensor([amax * s]), fmt)).item()
    assert largest == fmt.max / 2**margin


@pytest.mark.parametrize("value", [1e-6, 1e-20, 3e4, 1e30])
def test_values_far_outside_the_format_survive_scaling(value):
    x = torch.tensor([value, -value / 2])
    s = compute_scale(compute_amax(x).reshape(1), E4M3.max)
    torch.testing.assert_close(decode(cast(x * s, E4M3)) / s, x, rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_amax_is_the_largest_magnitude_in_fp32(dtype):
    assert compute_amax(torch.tensor([[1.0, -3.0], [2.0, 0.0]], dtype=dtype)).item() == 3.0
    assert compute_amax(torch.tensor([1.0, 2.5], dtype=dtype)).dtype == torch.float32
    assert compute_amax(torch.tensor(-2.0, dtype=dtype)).item() == 2.0


def test_amax_of_nothing_is_zero_and_of_non_finite_values_is_not_finite():
    assert compute_amax(torch.empty(0, 3)).item() == 0.0
    assert compute_amax(torch.empty(0, 3, dtype=torch.bfloat16)).dtype == torch.float32
    assert math.isinf(compute_amax(torch.tensor([1.0, -math.inf])).item())
    assert math.isnan(compute_amax(torch.tensor([1.0, math.nan, math.inf])).item())


@pytest.mark.parametrize("margin", [0, 3])
@pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=lambda f: f.name)
def test_the_largest_power_of_two_that_fits(fmt, margin):
    steps = fmt.max * torch.exp2(torch.arange(-80, 20).double()).float()
    amax = torch.cat([steps, torch.nextafter(steps, torch.tensor(torch.inf)), torch.rand(1000) * 10])
    scale = power_of_two_scale(amax, fmt, margin) * 2.0**margin
    assert torch.equal(torch.frexp(scale).mantissa, torch.full_like(scale, 0.5))
    assert (amax * scale <= fmt.max).all() and (amax * scale * 2 > fmt.max).all()


def test_no_power_of_two_for_what_has_no_magnitude():
    amax = torch.tensor([0.0, torch.inf, torch.nan, 448.0])
    assert power_of_two_scale(amax, E4M3, margin=1).tolist() == [1.0, 1.0, 1.0, 0.5]

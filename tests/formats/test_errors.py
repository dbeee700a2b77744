"""Errors of rounding: counts and ratios against values chosen by hand and against theory."""

import math

import pytest
import torch

from nemo_lowprec.formats import E4M3, E5M2, FP16, cast, decode
from nemo_lowprec.formats.errors import Errors, add_errors, clear, clipped_beyond, new_sums


def errors_of(*tensors, fmt=E4M3, scale=1.0):
    sums, extremes = new_sums(1, torch.device("cpu"))
    for values in tensors:
        stored = decode(cast(values * scale, fmt)) / scale
        add_errors(sums[0], extremes[0], values, stored, torch.tensor(1 / scale), clipped_beyond(fmt))
    return Errors.read(sums[0].tolist(), extremes[0].tolist())


def test_counts_are_those_of_the_values():
    values = torch.tensor([0.0, 1e-4, -1e-4, 2.0**-9, 1.0, 464.0, 465.0, -1e6, math.inf, math.nan])
    found = errors_of(values)
    assert found.count == 10 and found.nonfinite == 2
    assert found.underflow == pytest.approx(100 * 2 / 7)  # both 1e-4, of seven finite values that are not zero
    assert found.saturation == pytest.approx(100 * 2 / 10)  # 464 loses half a step, as rounding may
    assert found.amax == 1e6 and found.binades == pytest.approx(math.log2(1e6 / 1e-4))


@pytest.mark.parametrize(("fmt", "beyond"), [(E4M3, 464.0), (E5M2, 61440.0), (FP16, 65520.0)])
def test_values_are_clipped_half_a_step_beyond_the_largest(fmt, beyond):
    assert clipped_beyond(fmt) == beyond
    assert errors_of(torch.tensor([beyond]), fmt=fmt).saturation == 0
    assert errors_of(torch.tensor([beyond * 1.001]), fmt=fmt).saturation == 100


@pytest.mark.parametrize(("fmt", "bits"), [(E4M3, 3), (E5M2, 2)])
def test_sqnr_of_a_gaussian_is_that_of_the_mantissa(fmt, bits):
    # Errors are even over a step, which is 2**-bits of the power of two below the value.
    values = torch.randn(2**16, generator=torch.Generator().manual_seed(0))
    step = torch.exp2(values.abs().log2().floor() - bits)
    expected = 10 * math.log10(values.square().mean() / (step.square().mean() / 12))
    assert errors_of(values, fmt=fmt, scale=16.0).sqnr == pytest.approx(expected, abs=0.05)


def test_calls_add_up():
    values = torch.randn(64, 32, generator=torch.Generator().manual_seed(1)) * 100
    assert errors_of(values[:20], values[20:]) == errors_of(values)


def test_exact_values_have_no_ratio_and_empty_rows_no_scale():
    assert errors_of(torch.tensor([1.0, 2.0, -4.0])).sqnr is None
    assert errors_of(torch.zeros(3)).binades is None
    assert errors_of(torch.zeros(0)) == Errors(0, 0.0, None, 0.0, 0.0, 0, None, None)


def test_a_cleared_row_is_empty():
    sums, extremes = new_sums(2, torch.device("cpu"))
    before = sums.clone(), extremes.clone()
    add_errors(sums[1], extremes[1], torch.ones(3), torch.zeros(3), torch.tensor(1.0), 464.0)
    assert not torch.equal(sums, before[0])
    clear(sums, extremes)
    assert torch.equal(sums, before[0]) and torch.equal(extremes, before[1])

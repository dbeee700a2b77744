"""The bounds on errors of operands, against the reasons that docs/advising.rst gives for them."""

import math

import numpy as np
import pytest
import torch

from nemo_lowprec.formats import E4M3, E5M2, cast, decode
from nemo_lowprec.formats.errors import Errors, add_errors, clipped_beyond, new_sums
from nemo_lowprec.report.bounds import (
    MAX_AMAX_RATIO,
    MAX_SATURATION,
    MAX_UNDERFLOW,
    MIN_SQNR,
    beyond,
    crossed,
    ratios,
    said,
)  # fmt: skip

GAUSSIAN = torch.randn(2**20, generator=torch.Generator().manual_seed(0))


def errors_of(values, stored, scale=1.0, fmt=E4M3):
    sums, extremes = new_sums(1, torch.device("cpu"))
    add_errors(sums[0], extremes[0], values, stored, torch.tensor(1 / scale), clipped_beyond(fmt))
    return Errors.read(sums[0].tolist(), extremes[0].tolist())


def rounded(scale, fmt=E4M3):
    return errors_of(GAUSSIAN, decode(cast(GAUSSIAN * scale, fmt)) / scale, scale, fmt)


def test_sqnr_is_bounded_by_that_of_one_mantissa_bit():
    mantissa, exponent = torch.frexp(GAUSSIAN)
    one_bit = errors_of(GAUSSIAN, torch.ldexp((mantissa * 4).round() / 4, exponent)).sqnr
    largest = GAUSSIAN.abs().max().item()
    three, two = (rounded(fmt.max / largest, fmt).sqnr for fmt in (E4M3, E5M2))
    assert [three, two, one_bit] == pytest.approx([31.5, 25.6, 19.7], abs=0.06)
    assert one_bit < MIN_SQNR < one_bit + 0.5


def test_underflow_is_bounded_where_most_values_are_subnormal():
    smallest_normal = torch.finfo(E4M3.dtype).smallest_normal
    found = rounded(smallest_normal)  # the standard deviation of what is stored
    assert found.underflow == pytest.approx(MAX_UNDERFLOW, abs=0.1)
    assert ((GAUSSIAN * smallest_normal).abs() < smallest_normal).float().mean().item() == pytest.approx(0.68, abs=0.01)


def test_saturation_is_bounded_where_clipping_adds_as_much_noise_as_rounding():
    rounding = 10 ** (-rounded(E4M3.max / GAUSSIAN.abs().max().item()).sqnr / 10)

    def clipping(at):
        return (GAUSSIAN - GAUSSIAN.clamp(-at, at)).square().mean().item()

    at = min((n / 100 for n in range(200, 400)), key=lambda c: abs(math.log(clipping(c) / rounding)))
    assert rounded(E4M3.max / at).saturation == pytest.approx(MAX_SATURATION, abs=0.05)


def of(**changed):
    plain = {"underflow": 0.0, "saturation": 0.0, "nonfinite": 0, "sqnr": 31.0}
    return Errors(count=10, amax=1.0, scale=1.0, binades=1.0, **(plain | changed))


@pytest.mark.parametrize(
    ("errors", "words", "ratio"),
    [
        (of(), [], 10 ** ((MIN_SQNR - 31) / 10)),
        (of(sqnr=None), [], 0.0),
        (of(sqnr=MIN_SQNR - 20), ["SQNR 0.0 dB"], 100.0),
        (of(underflow=2 * MAX_UNDERFLOW), ["underflow 10.0 %"], 2.0),
        (of(saturation=3 * MAX_SATURATION), ["saturation 0.9 %"], 3.0),
        (of(nonfinite=3), ["3 values infinite or NaN"], math.inf),
    ],
)
def test_what_is_crossed_is_said_and_by_how_much(errors, words, ratio):
    assert crossed(errors) == words and beyond(errors) == pytest.approx(ratio)
    assert (beyond(errors) > 1) == bool(words)


def test_ratios_of_many_rows_are_those_of_each():
    rows = [of(), of(sqnr=None), of(sqnr=5.0), of(underflow=50.0, saturation=0.1), of(nonfinite=3)]
    names = ("nonfinite", "sqnr", "underflow", "saturation")
    numbers = {
        n: np.array([math.nan if (v := getattr(row, n)) is None else v for row in rows], dtype=float) for n in names
    }
    assert np.stack(list(ratios(numbers).values())).max(axis=0).tolist() == [beyond(row) for row in rows]
    assert [said(numbers, i) for i in range(len(rows))] == [crossed(row) for row in rows]


def test_an_amax_far_above_the_median_layer_s_is_a_crossing():
    numbers = {name: np.zeros(2) for name in ("nonfinite", "underflow", "saturation")} | {"sqnr": np.full(2, 31.0)}
    numbers["amax_ratio"] = np.array([MAX_AMAX_RATIO / 2, 1234.5 * 2])
    assert ratios(numbers)["amax_ratio"].tolist() == [0.5, pytest.approx(24.69)]
    assert said(numbers, 0) == [] and said(numbers, 1) == ["an amax 2,469 times that of the median layer"]

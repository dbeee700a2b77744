"""Curves over the steps of a run."""

from __future__ import annotations

import numpy as np
import pytest

from nemo_lowprec.report.curves import bin_starts, smoothed, window_of


def test_a_window_is_a_fiftieth_of_the_run_and_odd() -> None:
    assert [window_of(steps) for steps in (0, 1, 49, 100, 1000, 10_000)] == [1, 1, 1, 3, 21, 201]


@pytest.mark.parametrize("steps", [1, 3, 100, 777])
def test_smoothing_is_the_mean_of_the_window_as_far_as_it_is_there(steps: int) -> None:
    values = np.random.default_rng(0).normal(size=(2, steps))
    half = window_of(steps) // 2
    wanted = [[row[max(0, i - half) : i + half + 1].mean() for i in range(steps)] for row in values]
    np.testing.assert_allclose(smoothed(values), wanted, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(("count", "bins"), [(0, 5), (3, 5), (5, 5), (401, 200), (1000, 7)])
def test_bins_are_nearly_equal_and_none_is_empty(count: int, bins: int) -> None:
    starts = bin_starts(count, bins)
    sizes = np.diff([*starts, count])
    assert len(starts) == min(count, bins) and sizes.sum() == count
    assert count == 0 or (sizes.min() >= 1 and sizes.max() - sizes.min() <= 1 and starts[0] == 0)

"""Numbers of a run's file: a few significant digits, and null for numbers that are not finite."""

import json
import math

import torch

from nemo_lowprec.report.monitor.numbers import rounded, rounded_rows

VALUES = [0.0, 1.0, -1.0, 1000.0, 99999.0, 0.1, 1 / 3, -2 / 3e9, 1.23456e20, math.nan, math.inf, -math.inf, 31.50194]


def test_numbers_have_four_digits_and_those_that_are_not_finite_are_none():
    found = rounded(torch.tensor(VALUES, dtype=torch.float64))
    assert found == [None if not math.isfinite(v) else float(f"{v:.3e}") for v in VALUES]
    assert json.dumps(found[:9]) == "[0.0, 1.0, -1.0, 1000.0, 100000.0, 0.1, 0.3333, -6.667e-10, 1.235e+20]"


def test_rows_of_different_lengths_are_rounded_as_each_alone():
    rows = [torch.tensor(VALUES[i:], dtype=torch.float64) for i in (0, 5, len(VALUES), 9)]
    assert rounded_rows(rows) == [rounded(row) for row in rows]
    assert rounded_rows([]) == []

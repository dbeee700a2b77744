"""Layers that low precision spoils."""

from __future__ import annotations

import math
import statistics
from pathlib import Path

import pytest

from nemo_lowprec.report.bounds import MAX_UNDERFLOW, MIN_SQNR
from nemo_lowprec.report.monitor.runs import Run, read_run
from nemo_lowprec.report.spoiled import crossings
from tests.runs import layer_names, write_run

LAYERS = layer_names(2)


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return read_run(write_run(tmp_path))


def spoil(run: Run, layer: str, metric: str, value: float, samples: slice) -> None:
    by_row = run.operands.metrics[metric]
    numbers = by_row[layer, "input"]
    numbers[samples] = [value] * len(numbers[samples])
    by_row[layer, "input"] = numbers


def test_a_run_as_it_should_be_crosses_no_bound(run: Run) -> None:
    assert crossings(run) == []


def test_one_or_two_bad_samples_are_no_crossing_and_three_of_five_are(run: Run) -> None:
    spoil(run, LAYERS[4], "sqnr", 3.0, slice(6, 8))
    assert crossings(run) == []
    spoil(run, LAYERS[4], "sqnr", 3.0, slice(6, 9))
    (found,) = crossings(run)
    assert (found.layer, found.operand, found.metric, found.value) == (LAYERS[4], "input", "sqnr", 3.0)
    assert found.first_step == run.steps[6] and found.beyond == MIN_SQNR - 3.0


def test_the_farthest_beyond_its_bound_comes_first_whatever_the_metric(run: Run) -> None:
    spoil(run, LAYERS[1], "sqnr", MIN_SQNR - 4.0, slice(None))
    spoil(run, LAYERS[2], "underflow", MAX_UNDERFLOW * 10, slice(None))  # 10 dB
    spoil(run, LAYERS[3], "sqnr", MIN_SQNR - 12.0, slice(None))
    found = crossings(run)
    assert [crossing.layer for crossing in found] == [LAYERS[3], LAYERS[2], LAYERS[1]]
    assert [crossing.beyond for crossing in found] == pytest.approx([12.0, 10.0, 4.0])


@pytest.mark.parametrize(("operand", "crosses"), [("input", True), ("weight", True), ("grad_output", False)])
def test_an_amax_far_above_those_of_the_other_layers_is_named(run: Run, operand: str, crosses: bool) -> None:
    amaxes = run.operands.metrics["amax"]
    median = statistics.median(amaxes[layer, operand][0] for layer in LAYERS)
    amaxes[LAYERS[3], operand] = [1e4 * median] * len(run.steps)
    found = [(c.layer, c.operand, c.metric) for c in crossings(run)]
    assert found == [(LAYERS[3], operand, "amax_ratio")] * crosses
    for other in LAYERS[4:]:  # all of them are as large
        amaxes[other, operand] = [1e4 * median] * len(run.steps)
    assert crossings(run) == []


def test_values_that_are_not_finite_come_first_of_all(run: Run) -> None:
    spoil(run, LAYERS[1], "sqnr", 0.1, slice(None))
    spoil(run, LAYERS[5], "nonfinite", 12.0, slice(4, 9))
    assert [(c.layer, c.metric) for c in crossings(run)] == [(LAYERS[5], "nonfinite"), (LAYERS[1], "sqnr")]


def test_a_layer_whose_values_are_exact_or_unknown_crosses_nothing(run: Run) -> None:
    run.operands.metrics["sqnr"][LAYERS[0], "input"] = [None] * len(run.steps)
    assert math.isnan(run.operands.matrix("sqnr")[0, 0]) and crossings(run) == []


def test_a_run_of_two_samples_is_judged_by_both(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path, steps=40, every=20))
    spoil(run, LAYERS[0], "sqnr", 5.0, slice(None))
    assert [crossing.value for crossing in crossings(run)] == [5.0]

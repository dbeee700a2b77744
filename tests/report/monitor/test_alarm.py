"""The warning while a run trains: what is beyond its bounds, for how long, and which layer comes first."""

from __future__ import annotations

import json
import warnings
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from nemo_lowprec import prepare
from nemo_lowprec.engine import Engine
from nemo_lowprec.report.bounds import amax_ratios
from nemo_lowprec.report.monitor.alarm import Alarm
from nemo_lowprec.report.monitor.operands import KINDS
from nemo_lowprec.report.monitor.run_writer import FILE, RunWriter
from nemo_lowprec.report.monitor.runs import read_run
from nemo_lowprec.report.monitor.sample import OPERAND_METRICS, Sample
from nemo_lowprec.report.monitor.subject import Subject

ROWS = [(str(layer), kind) for layer in range(4) for kind in KINDS]
FINE = dict.fromkeys(OPERAND_METRICS, 0.0) | {"sqnr": 31.0, "amax": 1.0, "scale": 1.0, "binades": 15.0}


def sample(step: int, changed: dict[tuple[str, str], dict[str, float]], skipped: bool = False) -> Sample:
    """A sample of four layers, all of them as they should be but for what is ``changed``."""
    numbers = [FINE | changed.get(row, {}) for row in ROWS]
    operands = {
        metric: torch.tensor([one[metric] for one in numbers], dtype=torch.float64) for metric in OPERAND_METRICS
    }
    return Sample(step, ROWS, operands, skipped=skipped)


class Watched:
    """An alarm of a real model at a level, and what it has said."""

    def __init__(self, folder: Path, level: str = "bf16_with_fp8_mixed", **options) -> None:
        model = nn.Sequential(*(nn.Linear(32, 32) for _ in range(4)))
        model, _ = prepare(model, torch.optim.AdamW(model.parameters()), level, **options)
        self.path = folder / FILE
        self.alarm = Alarm(Subject(Engine.of(model)), RunWriter(folder))

    def said(self, *samples: Sample) -> list[str]:
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            for one in samples:
                self.alarm.look(one)
        return [str(one.message) for one in found]

    def noted(self) -> list[tuple[int, str, str, str]]:
        records = [json.loads(line) for line in self.path.read_text().splitlines()]
        return [(r["step"], r["layer"], r["operand"], r["text"]) for r in records if r["record"] == "warning"]


@pytest.fixture
def watched(tmp_path: Path) -> Watched:
    return Watched(tmp_path)


BAD = {("2", "input"): {"underflow": 40.0}}


def test_the_warning_names_layer_operand_numbers_and_remedies(watched: Watched, tmp_path: Path) -> None:
    worse = BAD | {("1", "grad_output"): {"sqnr": 19.0}, ("3", "grad_output"): {"saturation": 0.4}}
    (said,) = watched.said(*(sample(step, worse) for step in (2, 50)))
    assert said == (
        "2: its input has underflow 40.0 % since step 2, and 2 more layers lie beyond a bound. Keep it in half "
        'precision, plugins=bf16_with_fp8_mixed(skip=["2"]), or scale blocks of it, as '
        f"bf16_with_fp8_subchannel_scaling_mixed does. nemo-lowprec report {tmp_path} shows all layers."
    )
    assert watched.noted() == [
        (50, "1", "grad_output", "SQNR 19.0 dB since step 2"),
        (50, "2", "input", "underflow 40.0 % since step 2"),
        (50, "3", "grad_output", "saturation 0.4 % since step 2"),
    ]


def test_layers_that_are_skipped_already_stay_in_the_line_to_paste(tmp_path: Path) -> None:
    (said,) = Watched(tmp_path, skip=["0"]).said(sample(2, BAD), sample(30, BAD))
    assert 'bf16_with_fp8_mixed(skip=["0", "2"])' in said


@pytest.mark.parametrize(
    ("steps", "warns"),
    [
        ((2,), False),
        ((2, 10, 20), False),  # while the scales are new
        ((2, 10, 22), True),
        (tuple(range(30, 50)), False),
        (tuple(range(30, 51)), True),
        ((50, 100), True),
    ],
)
def test_one_sample_is_no_warning_and_twenty_steps_are(watched: Watched, steps: Sequence[int], warns: bool) -> None:
    assert len(watched.said(*(sample(step, BAD) for step in steps))) == warns
    assert bool(watched.path.read_text()) == warns


def test_a_good_sample_in_between_begins_anew(watched: Watched) -> None:
    assert not watched.said(sample(20, BAD), sample(40, {}), sample(60, BAD))
    assert watched.said(sample(80, BAD))


def test_another_operand_of_the_layer_does_not_go_on_where_the_first_was(watched: Watched) -> None:
    assert not watched.said(sample(20, BAD), sample(40, {("2", "weight"): {"underflow": 40.0}}))


def test_a_skipped_step_neither_counts_nor_begins_anew(watched: Watched) -> None:
    infinite = {row: {"nonfinite": 3.0} for row in ROWS}
    assert not watched.said(*(sample(step, infinite, skipped=True) for step in (4, 100, 200)))
    assert watched.said(sample(220, BAD), sample(230, infinite, skipped=True), sample(240, BAD))


def test_there_is_one_warning_a_run_and_each_operand_is_noted_once(watched: Watched) -> None:
    other = {("0", "weight"): {"sqnr": 3.0}}
    assert len(watched.said(*(sample(step, BAD) for step in (20, 40, 60)))) == 1
    assert not watched.said(*(sample(step, BAD | other) for step in (80, 100, 120)))
    assert [record[:3] for record in watched.noted()] == [(40, "2", "input"), (100, "0", "weight")]


def test_an_output_gradient_is_called_so(watched: Watched) -> None:
    bad = {("0", "grad_output"): {"underflow": 40.0}}
    assert watched.said(sample(20, bad), sample(40, bad))[0].startswith("0: its output gradient has underflow 40.0 %")


def test_the_smallest_ratio_since_the_beginning_orders_layers(watched: Watched) -> None:
    """A peak of one sample is no reason to name a layer first."""
    first = {("0", "input"): {"underflow": 6.0}, ("1", "input"): {"underflow": 30.0}}
    second = {("0", "input"): {"underflow": 90.0}, ("1", "input"): {"underflow": 30.0}}
    (said,) = watched.said(sample(20, first), sample(40, second))
    assert said.startswith("1: its input has underflow 30.0 %")


def test_values_that_are_not_finite_come_before_errors_of_rounding(watched: Watched) -> None:
    found = BAD | {("3", "input"): {"nonfinite": 7.0}}
    assert watched.said(sample(20, found), sample(40, found))[0].startswith("3: its input has 7 values infinite or NaN")


def test_a_large_weight_comes_before_all_others_with_a_remedy_of_its_own(watched: Watched) -> None:
    found = BAD | {("3", "input"): {"nonfinite": 7.0}, ("1", "weight"): {"amax": 2e4}}
    (said,) = watched.said(sample(20, found), sample(40, found))
    assert said.startswith("1: its weight has an amax 20,000 times that of the median layer since step 20, and 2 more")
    assert "Look at its initial values and at its learning rate;" in said and "scale blocks" not in said


def test_where_blocks_have_scales_of_their_own_large_layers_are_no_reason(tmp_path: Path) -> None:
    watched = Watched(tmp_path, "bf16_with_fp8_subchannel_scaling_mixed")
    large = {("1", kind): {"amax": 1e4} for kind in KINDS}
    assert not watched.said(sample(20, large), sample(40, large))
    (said,) = watched.said(sample(60, BAD), sample(80, BAD))
    assert "scale blocks" not in said and 'bf16_with_fp8_subchannel_scaling_mixed(skip=["2"])' in said


def test_amaxes_are_compared_with_the_median_of_their_operand() -> None:
    amaxes = np.array([1.0, 10.0, 1e-3, 2.0, 20.0, 1.0, 4.0, 4000.0, 9.0, 0.0, 30.0, 5.0])
    found = amax_ratios(ROWS, amaxes).tolist()
    assert found[0::3] == pytest.approx([0.5, 1.0, 2.0, float("nan")], nan_ok=True)  # zeros are left out
    assert found[1::3] == [0.4, 0.8, 160.0, 1.2]
    assert all(ratio != ratio for ratio in found[2::3])
    assert all(ratio != ratio for ratio in amax_ratios(ROWS[:6], amaxes[:6]).tolist())  # two layers


@pytest.mark.parametrize("layers", [3, 4, 9])
def test_each_sample_has_a_median_of_the_amaxes_that_are_known(layers: int) -> None:
    rows = [(str(i), "weight") for i in range(layers)]
    amaxes = np.random.default_rng(layers).lognormal(size=(layers, 40))
    amaxes[np.random.default_rng(0).random(amaxes.shape) < 0.3] = 0.0
    amaxes[0, :3] = [np.nan, np.inf, -1.0]
    found = amax_ratios(rows, amaxes)
    for sample, ratios in zip(amaxes.T, found.T, strict=True):
        known = [amax for amax in sample if 0 < amax < np.inf]
        middle = np.median(known) if len(known) >= 3 else np.nan
        wanted = [amax / middle if 0 < amax < np.inf else np.nan for amax in sample]
        assert ratios.tolist() == pytest.approx(wanted, nan_ok=True)
    assert np.isfinite(found).any()


def test_a_resumed_run_keeps_one_warning_of_an_operand(tmp_path: Path) -> None:
    writer = RunWriter(tmp_path)
    for start in (0, 40):
        writer.write("run", format=1, start=start)
        watched = Watched(tmp_path)
        assert len(watched.said(sample(start + 10, BAD), sample(start + 30, BAD))) == 1
    assert [(found["step"], found["layer"]) for found in read_run(tmp_path).warnings] == [(30, "2")]

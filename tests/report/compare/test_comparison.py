"""The figures of a comparison, of runs whose numbers are known."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from nemo_lowprec.report.compare.comparison import Comparison, compare, pairs
from nemo_lowprec.report.compare.groups import Group, read_groups
from nemo_lowprec.report.compare.intervals import half_width, quantile
from nemo_lowprec.report.curves import smoothed
from nemo_lowprec.report.monitor.runs import Run
from tests.runs import write_run

STEPS = 400
SPOILED = "model.layers.1.mlp.down_proj"


@pytest.mark.parametrize("freedom", [1, 2, 3, 4, 5, 9, 10, 29, 30, 100])
def test_the_quantile_is_that_of_students_distribution(freedom: int) -> None:
    assert quantile(freedom) == pytest.approx(stats.t.ppf(0.975, freedom), rel=1e-9)


def test_an_interval_is_the_one_of_a_t_test() -> None:
    numbers = np.array([0.3, -0.1, 0.25, 0.2])
    wanted = stats.ttest_1samp(numbers, 0).confidence_interval()
    mean, half = numbers.mean(), half_width(numbers)
    assert (mean - half, mean + half) == pytest.approx((wanted.low, wanted.high))


def run_of(seed: int | None, losses: list[float], level: str = "bf16_mixed") -> Run:
    about = {"level": level, "options": "", "seed": seed, "parameters": 1000}
    return Run(Path(f"{level}_{seed}"), [about], loss=dict(enumerate(losses, 1)), ended=True)


def compared(reference: list[Run], other: list[Run]) -> Comparison:
    return compare([Group("reference", reference), Group("other", other)])


def flat(level: float) -> list[float]:
    return [level] * STEPS


def test_runs_of_the_same_seed_are_compared_whatever_their_order() -> None:
    reference = [run_of(seed, flat(10.0 * seed)) for seed in (1, 2, 3)]
    other = [run_of(seed, flat(10.0 * seed + gap), "msamp_o2") for seed, gap in ((3, 0.3), (1, 0.1), (2, 0.2))]
    assert pairs(Group("b", other), Group("a", reference)) == [(0, 2), (1, 0), (2, 1)]
    found = compared(reference, other).outcomes[1]
    assert found.gap == pytest.approx(0.2) and found.final == pytest.approx(20.2)
    assert found.gap_half == pytest.approx(stats.t.ppf(0.975, 2) * 0.1 / np.sqrt(3))


def test_runs_without_seeds_are_compared_in_their_order() -> None:
    reference, other = ([run_of(None, flat(x)) for x in numbers] for numbers in ((1.0, 2.0), (1.5, 2.5)))
    assert compared(reference, other).outcomes[1].gap == pytest.approx(0.5)


def test_one_pair_gives_a_gap_and_no_interval() -> None:
    found = compared([run_of(1, flat(3.0))], [run_of(1, flat(3.5))])
    assert found.outcomes[1].gap == pytest.approx(0.5) and found.outcomes[1].gap_half is None
    assert not found.band and found.outcomes[1].leaves is None


def test_a_level_leaves_the_band_where_it_stays_outside_until_the_end() -> None:
    reference = [run_of(1, flat(3.0)), run_of(2, flat(3.2))]
    rising = [3.1] * 99 + [3.6] * 100 + [3.1] * 100 + [3.6] * 101  # outside twice, the second time for good
    found = compared(reference, [run_of(1, rising), run_of(2, rising)]).outcomes[1]
    mean = smoothed(np.array(rising))
    first = next(i for i in range(280, STEPS) if mean[i] > 3.2)
    assert found.leaves == first + 1 and 290 <= found.leaves <= 300


@pytest.mark.parametrize("until", [0, 39])
def test_what_lasts_for_less_than_a_tenth_of_the_run_is_no_leaving(until: int) -> None:
    reference = [run_of(1, flat(3.0)), run_of(2, flat(3.2))]
    losses = [3.1] * (STEPS - until + 5) + [9.0] * (until - 5)
    assert compared(reference, [run_of(1, losses)]).outcomes[1].leaves is None


def test_a_loss_that_is_not_finite_any_more_is_no_loss() -> None:
    broken = run_of(1, flat(3.0)[:200])
    broken.nonfinite = [7, *range(201, STEPS + 1)]
    found = compared([run_of(1, flat(3.0)), run_of(2, flat(3.1))], [broken]).outcomes[1]
    assert (found.nonfinite_from, found.final, found.gap) == (201, None, None)


def test_runs_that_have_no_step_in_common_are_refused() -> None:
    late = run_of(1, [])
    late.loss = {1000: 3.0}
    with pytest.raises(ValueError, match="The runs of other and of reference have no step in common"):
        compared([run_of(1, flat(3.0))], [late])


def test_a_shorter_run_is_compared_over_its_own_steps() -> None:
    reference = [run_of(1, [float(step) for step in range(STEPS)])]
    found = compared(reference, [run_of(1, [step + 0.25 for step in range(STEPS // 2)])]).outcomes[1]
    assert found.gap == pytest.approx(0.25) and found.steps[-1] == STEPS // 2


@pytest.fixture(scope="module")
def comparison(tmp_path_factory: pytest.TempPathFactory) -> Comparison:
    folder = tmp_path_factory.mktemp("compared")
    folders = [write_run(folder / f"bf16_mixed_{seed}", "bf16_mixed", steps=1000, seed=seed) for seed in (1, 2, 3)]
    spoiled = {"worse": 0.5, "worse_from": 600, "spoiled": SPOILED, "spoiled_from": 580}
    folders += [write_run(folder / f"msamp_o2_{s}", "msamp_o2", steps=1000, seed=s, **spoiled) for s in (1, 2, 3)]
    return compare(read_groups(folders[::-1]))


def test_files_of_runs_are_compared_by_validation_loss_speed_and_bytes(comparison: Comparison) -> None:
    reference, found = comparison.outcomes
    assert comparison.by_validation and reference.group.label == "bf16_mixed" and found.group.label == "msamp_o2"
    assert found.gap == pytest.approx(0.5, abs=0.02) and 0 < found.gap_half < 0.05
    assert 1.2 < found.tokens_per_second / reference.tokens_per_second < 1.5
    assert found.bytes_per_param == pytest.approx(2 + 1.03 + 1.03 + 2)
    assert reference.gap is None and reference.gaps is None


def test_the_layer_is_named_whose_sqnr_fell_where_the_level_left_the_band(comparison: Comparison) -> None:
    found = comparison.outcomes[1]
    assert 585 <= found.leaves <= 601
    assert (found.fall.layer, found.fall.operand) == (SPOILED, "input")
    assert found.fall.before > 25 and found.fall.after < 12


def test_levels_with_several_options_are_groups_by_option(tmp_path: Path) -> None:
    folders = [write_run(tmp_path / str(i), steps=40) for i in range(3)]
    file = folders[1] / "monitor.jsonl"
    file.write_text(file.read_text().replace("fp8_amax_history_len=16", "fp8_margin=1"))
    labels = {group.label: len(group.runs) for group in read_groups(folders)}
    assert labels == {"bf16_with_fp8_mixed fp8_amax_history_len=16": 2, "bf16_with_fp8_mixed fp8_margin=1": 1}


def test_what_cannot_be_compared_is_refused_in_a_sentence(tmp_path: Path) -> None:
    one, other = (write_run(tmp_path / name, steps=40) for name in "ab")
    with pytest.raises(ValueError, match="compare needs the folders of two runs or more"):
        read_groups([one])
    file = other / "monitor.jsonl"
    text = file.read_text()
    file.write_text(text.replace('"parameters":101234176', '"parameters":5'))
    with pytest.raises(ValueError, match=r"are runs of two models \(101,234,176 and 5 parameters\)"):
        read_groups([one, other])
    file.write_text(text.splitlines()[0] + "\n")
    with pytest.raises(ValueError, match="has no loss yet"):
        read_groups([one, other])
    many = [write_run(tmp_path / str(i), steps=40) for i in range(11)]
    for i, folder in enumerate(many):
        file = folder / "monitor.jsonl"
        file.write_text(file.read_text().replace("fp8_amax_history_len=16", f"fp8_margin={i}"))
    with pytest.raises(ValueError, match="11 levels are more than a chart shows: compare at most 10"):
        read_groups(many)

"""Loss scaling by Megatron's rules, step by step."""

import math

import pytest
import torch

from nemo_lowprec.chart.groups import LossScaleConfig
from nemo_lowprec.grads import LossScale


def run(config, outcomes):
    """The scale after each step; ``x`` overflows, ``.`` does not."""
    scale = LossScale(config)
    scales = []
    for outcome in outcomes:
        scale.update(outcome == "x")
        scales.append(scale.scale)
    return scales


def config(**options):
    return LossScaleConfig(
        **{"initial_loss_scale": 16.0, "loss_scale_window": 3, "hysteresis": 1, "min_loss_scale": 1.0, **options}
    )


def test_starts_at_the_initial_scale_of_2_to_the_16():
    assert LossScale(LossScaleConfig()).scale == 65536.0


def test_doubles_after_a_window_of_good_steps():
    assert run(config(), "......") == [16, 16, 32, 32, 32, 64]


def test_an_overflow_starts_the_window_again():
    assert run(config(), "..x...") == [16, 16, 8, 8, 8, 16]


def test_hysteresis_tolerates_overflows_before_the_scale_halves():
    assert run(config(hysteresis=2), "xxx") == [16, 8, 4]
    assert run(config(hysteresis=3), "xx.x") == [16, 16, 16, 8]  # however far apart


def test_growth_restores_the_hysteresis_and_good_steps_alone_do_not():
    assert run(config(hysteresis=2), "x..x") == [16, 16, 16, 8]
    assert run(config(hysteresis=2), "x...xx") == [16, 16, 16, 32, 32, 16]


def test_scale_never_falls_below_the_minimum():
    assert run(config(min_loss_scale=4.0), "xxxx") == [8, 4, 4, 4]
    assert run(config(initial_loss_scale=6.0, min_loss_scale=5.0), "x") == [5]


def test_static_scale_never_changes():
    assert run(LossScaleConfig(loss_scale=128.0, hysteresis=1, loss_scale_window=1), "x.x..") == [128.0] * 5


@pytest.mark.parametrize("saved_after", range(8))
def test_state_goes_on_where_it_was(saved_after):
    outcomes = "x..x...x"
    first = LossScale(config(hysteresis=2))
    for outcome in outcomes[:saved_after]:
        first.update(outcome == "x")
    second = LossScale(config(hysteresis=2, initial_loss_scale=1024.0))
    second.load_state_dict(first.state_dict())
    for outcome in outcomes[saved_after:]:
        first.update(outcome == "x")
        second.update(outcome == "x")
        assert second.state_dict() == first.state_dict()
    assert second.scale == run(config(hysteresis=2), outcomes)[-1]


def test_a_static_scale_stays_what_it_was_configured_to_be_when_another_is_loaded():
    static = LossScale(LossScaleConfig(loss_scale=128.0))
    static.load_state_dict(LossScale(LossScaleConfig()).state_dict())
    assert static.scale == 128.0


@pytest.mark.parametrize("name", ["loss_scale", "initial_loss_scale", "min_loss_scale"])
@pytest.mark.parametrize("value", [0, -1.0, math.inf, math.nan, True, "8"])
def test_a_bad_scale_is_a_value_error_that_names_it(name, value):
    with pytest.raises(ValueError, match=f"^{name}="):
        LossScaleConfig(**{name: value})


@pytest.mark.parametrize("name", ["loss_scale_window", "hysteresis"])
@pytest.mark.parametrize("value", [0, -1, 1.5, True, None, "2", (2,)])
def test_a_bad_count_is_a_value_error_that_names_it(name, value):
    with pytest.raises(ValueError, match=f"^{name}="):
        LossScaleConfig(**{name: value})


def test_an_initial_scale_below_the_minimum_is_a_value_error():
    with pytest.raises(ValueError, match=r"initial_loss_scale=2\.0 lies below min_loss_scale=4\.0"):
        LossScaleConfig(initial_loss_scale=2.0, min_loss_scale=4.0)


@pytest.mark.parametrize("name", ["loss_scale", "initial_loss_scale", "min_loss_scale"])
@pytest.mark.parametrize("value", [1e39, 1e300, 2.0**127, 10**400, 1e-9, 1e-40, 5e-324])
def test_a_scale_that_fp32_or_fp16_cannot_use_is_refused(name, value):
    with pytest.raises(ValueError, match=rf"^{name}=.* from 2\*\*-24 .* to 2\*\*126"):
        LossScaleConfig(**{name: value})


@pytest.mark.parametrize("name", ["loss_scale", "initial_loss_scale"])
@pytest.mark.parametrize("value", [2.0**-24, 2.0**126])
def test_the_largest_and_the_smallest_scale_and_their_reciprocals_are_normal_fp32_numbers(name, value):
    LossScaleConfig(**{name: value, "min_loss_scale": 2.0**-24})
    for number in (value, 1 / value):
        assert float(torch.tensor(number, dtype=torch.float32)) == number
        assert torch.finfo(torch.float32).tiny <= number <= torch.finfo(torch.float32).max


def test_a_scale_that_nothing_overflows_at_stays_one_that_fp32_holds():
    assert run(config(initial_loss_scale=2.0**125, loss_scale_window=1), "....") == [2.0**126] * 4


@pytest.mark.parametrize("window", [1, 2, 3, 5])
def test_a_resume_with_a_smaller_window_goes_on_growing(window):
    first = LossScale(config(loss_scale_window=10))
    for _ in range(8):
        first.update(False)
    second = LossScale(config(loss_scale_window=window))
    second.load_state_dict(first.state_dict())
    scales = []
    for _ in range(1 + window):
        second.update(False)
        scales.append(second.scale)
    assert scales == [32.0] * window + [64.0]


def test_a_resume_keeps_to_the_bounds_of_its_own_configuration():
    first = LossScale(config(hysteresis=5, initial_loss_scale=2.0, min_loss_scale=2.0))
    second = LossScale(config(hysteresis=1, min_loss_scale=8.0, initial_loss_scale=32.0))
    second.load_state_dict(first.state_dict())
    assert (second.scale, second.hysteresis) == (8.0, 1)


@pytest.mark.parametrize("options", [{"loss_scale": 2.0**100}, {"hysteresis": 1, "min_loss_scale": 8.0}])
def test_steps_that_are_all_skipped_are_said_to_be(options):
    with pytest.warns(UserWarning, match=r"The last 10 steps were skipped: .* Lower (min_)?loss_scale"):
        run(config(**options), "x" * 12)


def test_overflows_from_which_the_scale_recovers_are_not_worth_a_word(recwarn):
    run(config(initial_loss_scale=2.0**60), "x" * 40 + "." * 3 + "xx")
    run(LossScaleConfig(loss_scale=8.0), "xxxxxxxxx." * 3)
    assert not recwarn.list


@pytest.mark.parametrize("saved,window", [(8, 3), (8, 8), (2, 3)])
def test_counters_that_megatrons_own_scaler_has_saved_go_on_growing_with_a_smaller_window(saved, window):
    scale = LossScale(config(loss_scale_window=window, hysteresis=2))
    scale.load_state_dict({"scale": torch.tensor([4.0]), "growth_tracker": saved, "hysteresis_tracker": 5})
    assert scale.hysteresis == 2
    for _ in range(window):
        scale.update(False)
    assert scale.scale == 8.0

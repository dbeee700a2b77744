"""Loss scaling by Megatron's rules, step by step."""

import math

import pytest

from nemo_lowprec.grads import LossScale, LossScaleConfig


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

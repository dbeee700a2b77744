"""The benchmark of the monitor: how many rounds it takes, and which memory it counts."""

from contextlib import nullcontext

import pytest

from benchmarks import monitor
from benchmarks.everyday_models import SMALL
from benchmarks.measure import MIB

MODEL, LEVEL = "Llama 100M, 8 x 2048", "bf16_with_fp8_mixed"


@pytest.mark.parametrize(
    ("seconds", "first", "most", "rounds"), [(20, 1.0, 30, 10), (20, 0.1, 5, 5), (20, 25.0, 5, 3), (20, 25.0, 2, 2)]
)
def test_rounds_are_as_many_as_the_seconds_have_room_for(seconds, first, most, rounds):
    assert monitor.rounds_within(seconds, first, most) == rounds


@pytest.mark.skipif(not SMALL, reason="models are small without a GPU only")
@pytest.mark.parametrize(("seconds", "rounds"), [(0, 3), (1e6, 4)])
def test_a_figure_has_its_rounds(seconds, rounds):
    found = monitor.measure(MODEL, LEVEL, every=2, rounds=4, least=0, seconds=seconds)
    assert found["rounds"] == len(found["overheads"]) == rounds and found["steps"] == 2


@pytest.mark.skipif(not SMALL, reason="models are small without a GPU only")
@pytest.mark.parametrize("every", [None, 10])
def test_a_peak_is_that_of_reserved_memory_in_a_training_that_is_watched_or_not(every, monkeypatch):
    watched = []
    monkeypatch.setattr(monitor, "monitor", lambda model, folder, n: watched.append(n) or nullcontext())
    monkeypatch.setattr(monitor, "peaks", lambda: (90 * MIB, 100 * MIB))  # allocated, reserved
    assert monitor.peak(MODEL, LEVEL, every) == 100
    assert watched == [every] * (every is not None)

"""The benchmark of mixtures of experts, on models of a size that takes no time."""

import pytest

from benchmarks.experts import LEVELS, MODELS, measure_columns


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("level", LEVELS)
def test_experts_are_stored_as_declared(level, model):
    found = measure_columns(model, level)
    assert found["agrees"] and found["name"] == level
    assert found["by_column"]["Weight gradient"] == pytest.approx(1 if level == "msamp_o2" else 4, abs=0.02)

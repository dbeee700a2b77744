"""Trainings that were spoiled on purpose are warned of, with the spoiled layer first; others are not."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
from lightning.pytorch import Callback

from nemo_lowprec.report.monitor import PrecisionMonitor, read_run
from tests.spoiled import DOWN, QUERY, Spoil, Spoils, large_weights, outliers, train

LEVELS = ["bf16_with_fp8_mixed", "bf16_with_fp8_current_scaling_mixed", "te_fp8", "msamp_o2", "msamp_o3"]


def said_of(level: str, data_dir: Path, folder: Path, *callbacks: Callback, steps: int = 24) -> list[str]:
    """The warnings of the monitor in a training."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        train(level, data_dir, steps, *callbacks, PrecisionMonitor(2, folder))
    return [text for one in found if "since step" in (text := str(one.message))]


@pytest.mark.parametrize("layer", [DOWN, QUERY])
@pytest.mark.parametrize(("spoil", "operand"), [(large_weights, "weight"), (outliers, "input")])
@pytest.mark.parametrize("level", LEVELS)
def test_the_spoiled_layer_is_warned_of_first(
    level: str, spoil: Spoil, operand: str, layer: str, data_dir: Path, tmp_path: Path
) -> None:
    (said,) = said_of(level, data_dir, tmp_path, Spoils(layer, spoil))
    assert said.startswith(f"{layer}: its {operand} has ") and f'skip=["{layer}"])' in said
    assert (layer, operand) in {(found["layer"], found["operand"]) for found in read_run(tmp_path).warnings}


@pytest.mark.parametrize("level", [*LEVELS, "bf16_mixed", "bf16_with_fp8_subchannel_scaling_mixed"])
def test_a_training_as_it_should_be_is_not_warned_of(level: str, data_dir: Path, tmp_path: Path) -> None:
    assert said_of(level, data_dir, tmp_path, steps=30) == []
    run = read_run(tmp_path)
    assert run.warnings == [] and run.steps == list(range(2, 31, 2))

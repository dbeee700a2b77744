"""Whole scripts, as people write them, train after the migration."""

import runpy
import sys
from pathlib import Path

import accelerate
import pytest

from nemo_lowprec.engine import Engine

SCRIPTS = Path(__file__).parent / "scripts"
LEVELS = {"lightning_te": "bf16_with_fp8_mixed", "msamp_loop": "msamp_o2", "accelerate_fp8": "te_fp8"}


@pytest.fixture(autouse=True)
def _one_accelerator():
    yield
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerate.state.GradientState._reset_state()


@pytest.mark.parametrize("name", LEVELS)
def test_a_migrated_script_trains_at_its_level(name, migrated, monkeypatch):
    _, said = migrated((SCRIPTS / f"{name}.py").read_text())
    assert "Not migrated" not in said
    engines = []
    convert = Engine.convert

    def record(self, *args, **options):
        engines.append(self)
        return convert(self, *args, **options)

    monkeypatch.setattr(Engine, "convert", record)
    monkeypatch.setattr(sys, "argv", ["train.py"])
    losses = runpy.run_path("train.py", run_name="__main__")["losses"]
    assert {engine.level.name for engine in engines} == {LEVELS[name]}
    assert losses[-1] < 0.8 * losses[0]

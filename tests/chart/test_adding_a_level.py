"""The steps of docs/extending.rst, "Adding a level", followed for a made-up row in a copy of the package."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import nemo_lowprec

ROOT = Path(nemo_lowprec.__file__).parents[1]
ROW = """
_MINE = replace(
    _BF16_MIXED, name="bf16_with_low_bit_adam", summary="BF16 mixed with FP8 and FP16 optimizer states",
    optimizer_states=("fp8", "fp16"), comm="bf16",
)
"""
USE = """
import torch
from nemo_lowprec import CHART, bf16_with_low_bit_adam, recipes
from nemo_lowprec.cli import main
from nemo_lowprec.conf.choices import register_levels
from nemo_lowprec.models import CausalLM
from nemo_lowprec.report import Audit, plan_training
from tests.support import Net, loader, trainer

level = bf16_with_low_bit_adam()
assert level.level is CHART["bf16_with_low_bit_adam"] and repr(level) == "bf16_with_low_bit_adam()"
assert recipes.bf16_with_low_bit_adam().__fn_or_cls__ is not None
register_levels()
main(["levels"])

audit = Audit()
trainer(level, audit, max_steps=2).fit(Net(optimizer=lambda p: torch.optim.AdamW(p, lr=1e-3)), loader(8))
assert audit.report.agrees, str(audit.report)
found = {f.column: f.observed for f in audit.report.findings if f.part == "converted"}
print(found)
print(plan_training(Net(), bf16_with_low_bit_adam()))
"""


@pytest.fixture(scope="module")
def followed(tmp_path_factory):
    """What a process prints that uses the level of a package with one row more."""
    copy = tmp_path_factory.mktemp("copy")
    shutil.copytree(ROOT / "nemo_lowprec", copy / "nemo_lowprec", ignore=shutil.ignore_patterns("__pycache__"))
    chart = copy / "nemo_lowprec" / "chart" / "rows.py"
    text = chart.read_text()
    assert "_BF16_MIXED = " in text and "_ROWS = (\n" in text
    chart.write_text(text.replace("_ROWS = (\n", f"{ROW}_ROWS = (\n    _MINE, "))
    path = os.pathsep.join([str(copy), str(ROOT), str(ROOT / "tests")])
    done = subprocess.run(
        [sys.executable, "-c", USE], cwd=copy, env={**os.environ, "PYTHONPATH": path, "COLUMNS": "100"},
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_the_row_is_on_every_face(followed):
    assert "bf16_with_low_bit_adam" in followed and "FP8+FP16" in followed


def test_a_run_is_found_to_do_what_the_row_declares(followed):
    assert "'Optimizer states': 'fp16'" in followed and "'Weight': 'bf16'" in followed

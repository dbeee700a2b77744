"""Trainings that were spoiled on purpose: their report names the layer first."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.browser import opened
from nemo_lowprec.report.monitor import PrecisionMonitor, read_run
from nemo_lowprec.report.page.run_page import write_report
from nemo_lowprec.report.spoiled import crossings
from tests.spoiled import DOWN, Spoil, Spoils, large_weights, outliers, train


@pytest.mark.parametrize(("spoil", "operand"), [(large_weights, "weight"), (outliers, "input")])
def test_the_report_names_the_spoiled_layer_first(
    chromium: Any, spoil: Spoil, operand: str, data_dir: Path, tmp_path: Path
) -> None:
    train("bf16_with_fp8_mixed", data_dir, 14, Spoils(DOWN, spoil), PrecisionMonitor(2, tmp_path))
    first = crossings(read_run(tmp_path))[0]
    assert (first.layer, first.operand) == (DOWN, operand)
    with opened(chromium, write_report(tmp_path)) as found:
        assert found.said == []
        assert found.page.locator("#verdict a.layer").first.inner_text() == DOWN
        assert found.page.locator("#history").get_attribute("data-layer") == DOWN

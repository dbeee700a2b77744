"""Pictures of pages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from benchmarks.screenshots import MOST_BYTES, screenshot
from nemo_lowprec.report.page.run_page import write_report
from tests.runs import write_run


def test_a_picture_is_as_wide_as_asked_small_and_ends_behind_a_section(tmp_path: Path) -> None:
    page = write_report(write_run(tmp_path))
    sizes = {}
    wanted: dict[str, dict[str, Any]] = {
        "whole": {},
        "layers": {"until": "layers"},
        "dark": {"until": "loss", "dark": True},
        "loss": {"since": "loss", "until": "loss"},
    }
    for name, options in wanted.items():
        out = tmp_path / f"{name}.png"
        screenshot(page, out, **options)
        assert out.stat().st_size <= MOST_BYTES
        with Image.open(out) as image:
            sizes[name] = image.size
            corner = image.convert("L").getpixel((2, 2))
            assert corner < 60 if name == "dark" else corner > 240
    assert {width for width, _ in sizes.values()} == {1200}
    assert sizes["loss"][1] + 100 < sizes["dark"][1] < sizes["layers"][1] < sizes["whole"][1]
    for end in ("since", "until"):
        with pytest.raises(ValueError, match="has no section 'nowhere'"):
            screenshot(page, tmp_path / "none.png", **{end: "nowhere"})

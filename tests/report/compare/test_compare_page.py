"""The table and the page of a comparison."""

from __future__ import annotations

import base64
import gzip
import json
import re
from pathlib import Path
from typing import Any

import pytest

from benchmarks.browser import opened
from nemo_lowprec.report.compare.comparison import Comparison, compare
from nemo_lowprec.report.compare.groups import read_groups
from nemo_lowprec.report.compare.page import comparison_page
from nemo_lowprec.report.compare.table import print_comparison
from nemo_lowprec.report.page.page import write_page
from tests.runs import write_run

LONG = "bf16_with_fp8_subchannel_scaling_mixed"
LEVELS = ("bf16_mixed", "msamp_o2", LONG)
SPOILED = "model.layers.1.mlp.down_proj"


@pytest.fixture(scope="module")
def comparison(tmp_path_factory: pytest.TempPathFactory) -> Comparison:
    folder = tmp_path_factory.mktemp("compared")
    worse: dict[str, dict[str, Any]] = {"msamp_o2": {"worse": 0.5, "worse_from": 200, "spoiled": SPOILED}}
    return compare(
        read_groups(
            [write_run(folder / f"{level}_{seed}", level, seed=seed, **worse.get(level, {})) for level in LEVELS
             for seed in (1, 2)]
        )
    )  # fmt: skip


@pytest.fixture
def path(comparison: Comparison, tmp_path: Path) -> Path:
    write_page(tmp_path / "compare.html", comparison_page(comparison))
    return tmp_path / "compare.html"


def test_the_table_fits_the_screen_and_holds_every_figure(
    comparison: Comparison, capsys: pytest.CaptureFixture
) -> None:
    print_comparison(comparison)
    printed = capsys.readouterr().out
    assert max(map(len, printed.splitlines())) <= 80 and "…" not in printed
    for outcome in comparison.outcomes:
        assert f"{outcome.final:.4f}" in printed and f"{outcome.tokens_per_second:,.0f}" in printed
        assert f"{outcome.bytes_per_param:.2f}" in printed
    assert f"±{comparison.outcomes[1].gap_half:.4f}" in printed
    assert "zero lies outside the 95 % interval" in " ".join(printed.split())
    assert "subchannel_scaling_" in printed


def test_curves_go_on_to_the_last_step(comparison: Comparison, path: Path) -> None:
    (packed,) = re.findall('id="packed">([^<]+)<', path.read_text())
    charts = json.loads(gzip.decompress(base64.b64decode(packed)))["charts"]
    for name, lines in (("losses", len(LEVELS)), ("gaps", len(LEVELS) - 1)):
        last = [point for point in charts[name]["data"]["values"] if point["step"] == comparison.outcomes[0].steps[-1]]
        assert len(last) == lines


@pytest.mark.parametrize("dark", [False, True])
def test_the_page_draws_every_level_without_a_word_or_network(chromium: Any, path: Path, dark: bool) -> None:
    with opened(chromium, path, dark=dark) as found:
        assert found.said == [] and found.requests == [path.as_uri()]
        assert found.page.locator("[data-chart=losses] .mark-line.role-mark path").count() == len(LEVELS)
        assert found.page.locator("[data-chart=gaps] .mark-line.role-mark path").count() == len(LEVELS) - 1
        for name in ("rates", "peaks", "bytes"):
            assert found.page.locator(f"[data-chart={name}] .mark-rect.role-mark path").count() == len(LEVELS)
        assert found.page.locator(".verdict.bad").count() == 1
        assert found.page.locator(".verdict.bad strong").inner_text() == "msamp_o2"
        assert SPOILED in found.page.locator("#spoiled").inner_text()
        assert found.page.locator("#runs tbody tr").count() == 2 * len(LEVELS)


def test_a_level_has_one_colour_on_the_whole_page(chromium: Any, path: Path) -> None:
    stroke = "all => all.map(one => one.getAttribute('stroke'))"
    fill = "all => all.map(one => one.getAttribute('fill'))"
    with opened(chromium, path) as found:
        losses = found.page.locator("[data-chart=losses] .mark-line.role-mark path").evaluate_all(stroke)
        gaps = found.page.locator("[data-chart=gaps] .mark-line.role-mark path").evaluate_all(stroke)
        bars = found.page.locator("[data-chart=rates] .mark-rect.role-mark path").evaluate_all(fill)
        key = "all => all.map(one => getComputedStyle(one).backgroundColor)"
        keys = found.page.locator("#losses .key i").evaluate_all(key)
        assert len(set(losses)) == len(LEVELS) and gaps == losses[1:] and bars == losses
        rgb = [f"rgb({', '.join(str(int(c[i : i + 2], 16)) for i in (1, 3, 5))})" for c in losses]
        assert keys == rgb


def test_a_phone_shows_the_page_without_scrolling_sideways(chromium: Any, path: Path) -> None:
    with opened(chromium, path, width=390) as found:
        assert found.page.evaluate("document.documentElement.scrollWidth") == 390
        for name in ("rates", "peaks", "bytes"):
            chart = found.page.locator(f"[data-chart={name}] svg")
            assert "".join(chart.locator(".role-axis-label tspan").all_text_contents()) == LONG
            middle = "e => { const b = e.getBoundingClientRect(); return b.top + b.height / 2 }"
            bars = chart.locator(".mark-rect.role-mark path").all()
            labels = chart.locator(".role-axis-label text").all()
            for bar, label in zip(bars, labels, strict=True):
                assert bar.evaluate(middle) == pytest.approx(label.evaluate(middle), abs=3)
            right = chart.evaluate("e => e.getBoundingClientRect().right")
            ends = "all => all.map(e => e.getBoundingClientRect().right)"
            assert max(chart.locator(".mark-text.role-mark text").evaluate_all(ends)) <= right


def test_one_seed_a_level_is_compared_without_a_band(
    chromium: Any, comparison: Comparison, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    folders = [outcome.group.runs[0].folder for outcome in comparison.outcomes]
    single = compare(read_groups(folders))
    print_comparison(single)
    printed = " ".join(capsys.readouterr().out.split())
    assert "one pair of runs gives no confidence interval" in printed
    assert "The reference has one seed, and so no band to leave" in printed
    write_page(tmp_path / "single.html", comparison_page(single))
    with opened(chromium, tmp_path / "single.html") as found:
        assert found.said == []

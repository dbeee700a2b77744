"""The page of a run, in a real browser: what is drawn, and what a reader can do with it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from benchmarks.browser import Opened, opened
from nemo_lowprec.report.monitor.run_writer import FILE
from nemo_lowprec.report.monitor.runs import read_run
from nemo_lowprec.report.page.run_page import write_report
from tests.runs import layer_names, tear_last_line, write_run

SPOILED = "model.layers.1.mlp.down_proj"
LAYERS = layer_names(2)


@pytest.fixture(scope="module")
def spoiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of a run of 12 layers, one of which is spoiled, that was resumed once and then killed."""
    folder = tmp_path_factory.mktemp("spoiled")
    write_run(folder, spoiled=SPOILED, spoiled_from=150, resumed_at=[200], ended=False)
    tear_last_line(folder)
    return write_report(folder)


def shown_values(found: Opened, metric: str) -> set[str]:
    """What the points of a history say to a screen reader."""
    points = found.page.locator(f"[data-chart=history-{metric}] .mark-symbol path")
    return set(points.evaluate_all("all => all.map(one => one.getAttribute('aria-label'))"))


def numbers(path: Path, metric: str, layer: str, operand: str) -> dict[int, float]:
    run = read_run(path.parent)
    values = run.operands.of(metric, (layer, operand))
    return {step: value for step, value in zip(run.steps, values, strict=True) if value is not None}


@pytest.mark.parametrize("level", ["bf16_with_fp8_mixed", "msamp_o2", "bf16_mixed", "fp16_mixed"])
def test_a_page_draws_itself_without_a_word_to_the_console_and_without_network(
    chromium: Any, level: str, tmp_path: Path
) -> None:
    path = write_report(write_run(tmp_path, level))
    with opened(chromium, path) as found:
        assert found.said == []
        assert found.requests == [path.as_uri()]
        charts = found.page.locator("[data-chart]")
        assert charts.count() >= 3
        assert found.page.locator("[data-chart]:not(:has(svg, canvas))").count() == 0


def test_what_a_kill_and_a_resume_left_is_drawn(chromium: Any, spoiled: Path) -> None:
    with opened(chromium, spoiled) as found:
        assert found.said == []
        assert "it has not ended in order" in found.page.locator(".summary").inner_text()
        assert found.page.locator("[data-chart=loss] .mark-rule.role-mark line").count() == 1


@pytest.mark.parametrize("panel", ["sqnr", "underflow", "saturation"])
def test_a_heatmap_has_one_cell_for_each_layer_and_sampled_step(chromium: Any, spoiled: Path, panel: str) -> None:
    steps = read_run(spoiled.parent).steps
    assert len(steps) > 15
    with opened(chromium, spoiled) as found:
        assert found.cells(panel) == len(LAYERS) * len(steps)


def test_a_click_on_a_cell_shows_the_history_of_its_layer(chromium: Any, spoiled: Path) -> None:
    with opened(chromium, spoiled) as found:
        assert found.page.locator("#history").get_attribute("data-layer") == SPOILED  # the worst one comes first
        steps, layer = len(read_run(spoiled.parent).steps), LAYERS[3]
        found.page.locator("[data-panel=underflow] .layer_0_marks > path").nth(3 * steps + 5).click()
        found.page.wait_for_function(f"document.getElementById('history').dataset.layer === '{layer}'")
        assert found.page.locator("#history select").input_value() == layer
        for operand, title in (("input", "input"), ("grad_output", "output gradient")):
            last, value = list(numbers(spoiled, "sqnr", layer, operand).items())[-1]
            said = [s for s in shown_values(found, "sqnr") if f"step: {last}" in s and f"operand: {title}" in s]
            assert len(said) == 1 and f"{float(f'{value:.3g}'):g}" in said[0]
        assert found.said == []


def test_a_layer_is_chosen_by_keyboard_and_from_the_verdict(chromium: Any, spoiled: Path) -> None:
    with opened(chromium, spoiled) as found:
        before = shown_values(found, "amax")
        found.page.locator("#history select").select_option(LAYERS[0])
        found.page.wait_for_function(f"document.getElementById('history').dataset.layer === '{LAYERS[0]}'")
        assert shown_values(found, "amax").isdisjoint(before)
        found.page.locator("#verdict a.layer").first.click()
        found.page.wait_for_function(f"document.getElementById('history').dataset.layer === '{SPOILED}'")


def test_an_operand_is_chosen(chromium: Any, spoiled: Path) -> None:
    steps = read_run(spoiled.parent).steps
    with opened(chromium, spoiled) as found:
        for operand, title in (("input", "input"), ("grad_output", "output gradient"), ("weight", "weight")):
            found.page.locator("[data-for=layers]").get_by_text(title, exact=True).click()
            value = numbers(spoiled, "sqnr", SPOILED, operand)[steps[-1]]
            last = found.page.locator("[data-panel=sqnr] .layer_0_marks > path").nth(len(LAYERS) * len(steps) - 1)
            wanted = f"step: {steps[-1]}; SQNR, dB: {float(f'{value:.3g}'):g}"
            found.page.wait_for_function(
                "([cell, wanted]) => document.querySelectorAll('[data-panel=sqnr] .layer_0_marks > path')[cell]"
                "?.getAttribute('aria-label').endsWith(wanted)",
                arg=[len(LAYERS) * len(steps) - 1, wanted],
            )
            red, green, _ = (int(part) for part in last.get_attribute("fill")[4:-1].split(","))
            assert (red - green > 100) is (operand == "input")  # it is the spoiled one
        assert found.said == []


def test_the_colours_of_a_map_that_is_scrolled_are_in_sight(chromium: Any, tmp_path: Path) -> None:
    path = write_report(write_run(tmp_path, "msamp_o2", blocks=60, steps=60))
    with opened(chromium, path) as found:
        place = found.page.locator("[data-maps=params]")
        assert place.evaluate("e => e.scrollHeight > e.clientHeight + 100")
        colours, sight = place.locator(".role-legend").bounding_box(), place.bounding_box()
        assert sight["y"] < colours["y"] < colours["y"] + colours["height"] < sight["y"] + 100


def test_tokens_a_second_are_whole_numbers(chromium: Any, spoiled: Path) -> None:
    with opened(chromium, spoiled) as found:
        texts = found.page.locator("[data-chart=rate] .role-axis-label text").all_text_contents()
        assert "0" in texts and any(re.fullmatch(r"\d\d,000", text) for text in texts)


def luminance(colour: str) -> float:
    red, green, blue = (int(part) for part in colour.removeprefix("rgb(").rstrip(")").split(",")[:3])
    return (0.2126 * red + 0.7152 * green + 0.0722 * blue) / 255


@pytest.mark.parametrize("dark", [False, True])
def test_light_and_dark_follow_the_system_and_the_button(chromium: Any, spoiled: Path, dark: bool) -> None:
    ground = "getComputedStyle(document.documentElement).backgroundColor"
    ink = "getComputedStyle(document.querySelector('[data-chart=loss] svg text')).fill"
    with opened(chromium, spoiled, dark=dark) as found:
        for times, is_dark in ((1, dark), (2, not dark)):
            found.drawn(times)
            below, above = (luminance(found.page.evaluate(code)) for code in (ground, ink))
            assert (below < above) is is_dark and abs(below - above) > 0.4
            found.page.locator("#theme").click()
        assert found.said == []


def test_a_phone_shows_the_page_without_scrolling_sideways(chromium: Any, spoiled: Path) -> None:
    with opened(chromium, spoiled, width=390) as found:
        assert found.page.evaluate("document.documentElement.scrollWidth") == 390
        for chart in found.page.locator(".chart").all():
            box = chart.bounding_box()
            assert box["width"] > 250 and box["x"] >= 0 and box["x"] + box["width"] <= 390
        assert found.said == []


def test_paper_shows_all_of_a_dark_page_in_black_on_white(chromium: Any, spoiled: Path) -> None:
    with opened(chromium, spoiled, dark=True) as found:
        found.page.emulate_media(media="print")
        assert luminance(found.page.evaluate("getComputedStyle(document.documentElement).backgroundColor")) > 0.99
        ink = found.page.evaluate("getComputedStyle(document.querySelector('[data-chart=loss] svg text')).fill")
        assert luminance(ink) < 0.3
        assert not found.page.locator("#theme").is_visible()
        assert found.page.evaluate("getComputedStyle(document.querySelector('.maps')).maxHeight") == "none"


def test_the_spoiled_layers_come_first_the_worst_of_them_on_top(chromium: Any, tmp_path: Path) -> None:
    write_run(tmp_path, spoiled=SPOILED, spoiled_from=100)
    path = tmp_path / FILE
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    row = next(r["rows"] for r in lines if r["record"] == "operands").index([LAYERS[2], "grad_output"])
    for record in lines:
        if record["record"] == "sample":
            record["operands"]["sqnr"][row] = 1.5
    path.write_text("".join(json.dumps(record) + "\n" for record in lines))
    with opened(chromium, write_report(tmp_path)) as found:
        assert found.page.locator("#verdict a.layer").all_inner_texts() == [LAYERS[2], SPOILED]
        said = found.page.locator("#verdict li").first.inner_text()
        assert "SQNR of the output gradient 1.5 dB (bound 20 dB)" in said and "first at step 1." in said
        assert found.page.locator("#history").get_attribute("data-layer") == LAYERS[2]
        assert found.page.locator(".choices input:checked").first.get_attribute("value") == "grad_output"


def test_a_long_run_of_many_layers_is_thinned_and_still_answers_clicks(chromium: Any, tmp_path: Path) -> None:
    layers = layer_names(17)
    path = write_report(write_run(tmp_path, blocks=17, steps=1050, every=5))
    assert path.stat().st_size < 3e6
    with opened(chromium, path) as found:
        canvas = found.page.locator("[data-panel=sqnr] canvas")  # SVG would be slow
        box = canvas.bounding_box()
        canvas.click(position={"x": box["width"] * 0.7, "y": box["height"] / 2})
        found.page.wait_for_function(f"document.getElementById('history').dataset.layer !== '{layers[0]}'")
        chosen = layers.index(found.page.locator("#history").get_attribute("data-layer"))
        assert 40 < chosen < 62
        assert len(shown_values(found, "sqnr")) == 3 * 200
        assert found.said == []


def test_a_loss_that_is_nan_and_values_that_are_infinite_are_told(chromium: Any, tmp_path: Path) -> None:
    write_run(tmp_path)
    path = tmp_path / FILE
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for record in lines:
        if record["record"] == "steps" and record["last"] > 200:
            record["loss"] = [None] * len(record["loss"])
        elif record["record"] == "validation" and record["step"] > 200:
            record["metrics"]["val/loss"] = None
        elif record["record"] == "sample" and record["step"] > 200:
            record["operands"]["nonfinite"][0] = 7
    path.write_text("".join(json.dumps(record) + "\n" for record in lines))
    with opened(chromium, write_report(tmp_path)) as found:
        said = found.page.locator(".lead").inner_text()
        assert "The loss is infinite or NaN from step 201 on." in " ".join(said.split())
        assert "7 values of the input are infinite or NaN" in said and "at step 200" in said
        assert found.page.locator("[data-chart=history-nonfinite] svg").count() == 1
        assert found.said == []


def test_words_of_a_run_are_no_code(chromium: Any, tmp_path: Path) -> None:
    write_run(tmp_path)
    path, word = tmp_path / FILE, "<script>document.title = 'taken'</script>"
    path.write_text(path.read_text().replace("nemo-lowprec pretrain", json.dumps(word)[1:-1]))
    with opened(chromium, write_report(tmp_path)) as found:
        assert found.page.title() == "bf16_with_fp8_mixed: report of a run"
        assert word in found.page.locator("pre").inner_text()

"""What the heatmaps of a page hold."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest

from nemo_lowprec.report.monitor.run_table import sampled, table_of
from nemo_lowprec.report.monitor.runs import read_run
from nemo_lowprec.report.page.heatmaps import layer_maps, param_maps, short_names
from nemo_lowprec.report.page.run_page import write_report
from tests.runs import layer_names, write_run


def test_a_cell_of_a_long_run_holds_the_worst_of_its_samples(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path, blocks=1, steps=1600, every=4))
    maps = layer_maps(run)
    assert len(run.steps) == 400 and len(maps["first"]) == 200
    for metric, worst in (("sqnr", min), ("underflow", max), ("amax", max), ("scale", min)):
        values = run.operands.of(metric, (layer_names(1)[2], "input"))
        pairs = [worst(values[i : i + 2]) for i in range(0, 400, 2)]
        assert maps["values"][metric]["input"][2] == [float(f"{value:.3g}") for value in pairs]
    assert maps["first"][:2] == [1, 9] and maps["last"][:2] == [5, 13] and maps["next"][:2] == [9, 17]


def test_each_sample_of_a_short_run_has_a_cell_of_its_own(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path, steps=400, every=20))
    maps = layer_maps(run)
    assert maps["first"] == maps["last"] == run.steps and maps["rows"] == layer_names(2)
    assert maps["next"] == [*run.steps[1:], run.steps[-1] + 20]


def test_a_layer_without_an_operand_has_a_row_without_numbers(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path))
    absent = (layer_names(2)[0], "weight")
    run.operands.rows.remove(absent)
    maps = layer_maps(run)
    assert set(maps["values"]["sqnr"]["weight"][0]) == {None}
    assert None not in maps["values"]["sqnr"]["weight"][1] + maps["values"]["sqnr"]["input"][0]


def test_metrics_of_parameters_that_nothing_rounds_are_not_offered(tmp_path: Path) -> None:
    offered = {
        level: [choice["name"] for choice in param_maps(read_run(write_run(tmp_path / level, level)))["choices"]]
        for level in ("bf16_mixed", "msamp_o2")
    }
    assert offered == {
        "bf16_mixed": [],
        "msamp_o2": ["lost", "weight_sqnr", "gradient_sqnr", "first_sqnr", "second_sqnr"],
    }


def test_a_page_of_a_thousand_layers_can_be_mailed(tmp_path: Path) -> None:
    path = write_report(write_run(tmp_path, blocks=167, steps=120, every=2))
    assert 1.5e6 < path.stat().st_size < 3e6


@pytest.mark.parametrize(("before", "behind"), [(0, 0), (1, 1), (1, 12)])
def test_names_of_blocks_stand_apart_and_the_larger_block_is_named(tmp_path: Path, before: int, behind: int) -> None:
    run = read_run(write_run(tmp_path, "msamp_o2", blocks=12))
    names = [(f"model.{i}_embed.weight",) for i in range(before)]
    names += [*run.params.rows, *[(f"model.{i}_norm.weight",) for i in range(behind)]]
    run.params = table_of([sampled(names, {"lost": [1.0] * len(names)}) for _ in run.steps])
    chart = param_maps(run)["panels"]["lost"]["chart"]
    rows = [names.index((name,)) for name in chart["encoding"]["y"]["axis"]["values"]]
    height = chart["height"] / len(names)
    labels = next(param["value"] for param in chart["params"] if param["name"] == "labels")
    assert {f"layers.{i}" for i in range(12)} <= set(labels.values()) and len(labels) == len(rows)
    assert height < 11 and all(later - row >= 11 / height for row, later in pairwise(rows))
    assert ("0_norm.weight" in "".join(labels.values())) is (behind > 0)


def test_names_are_shown_without_what_they_share() -> None:
    assert short_names(["model.layers.0.q", "model.layers.1.q"]) == ["0", "1"]
    assert short_names(["model.layers.0.q.weight", "model.layers.0.k.weight"]) == ["q", "k"]
    assert short_names(["model.layers.0.q"]) == ["model.layers.0.q"]
    assert short_names(["model.layers.0.q", "model.head"]) == ["layers.0.q", "head"]
    assert short_names(["one.q", "one.q.base"]) == ["q", "q.base"]
    assert short_names([]) == []

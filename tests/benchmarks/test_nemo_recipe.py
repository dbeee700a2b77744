"""The figures and the table of NeMo's recipe, of runs that are made up here."""

import pytest

from benchmarks import nemo_recipe, nemo_tables
from benchmarks.record import read


def run(path, turn, seconds, losses, level="bf16_mixed"):
    return {"level": level, "round": turn, "path": path, "seconds": seconds, "losses": losses, "gib": 1.5}


RUNS = [
    run("nemo", 0, [0.2, 0.4, 0.2], [9.0, 8.0]),
    run("level", 0, [0.1, 0.1, 0.9], [9.0, 8.25]),
    run("nemo", 1, [0.2], [9.0, 8.0]),
    {"level": "bf16_with_fp8_mixed", "round": 0, "path": "nemo", "error": "TypeError: no such argument"},
]


def test_figures_are_medians_of_rounds_and_name_the_errors(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.argv", ["nemo_recipe"])
    nemo_recipe.write(tmp_path / "out.jsonl", RUNS, tokens=100)
    figures = {(f["level"], f["path"]): f for f in read(tmp_path / "out.jsonl")[1]}
    ours = figures["bf16_mixed", "level"]
    assert (ours["ms"], ours["tokens_per_s"], ours["of_nemo"], ours["losses"]) == (100.0, 1000, 2.0, [9.0, 8.25])
    assert figures["bf16_mixed", "nemo"]["rounds"] == 2
    assert figures["bf16_with_fp8_mixed", "nemo"]["error"].startswith("TypeError")


def test_a_run_that_is_measured_again_replaces_its_figure_alone(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.argv", ["nemo_recipe"])
    nemo_recipe.write(tmp_path / "out.jsonl", RUNS, tokens=100)
    nemo_recipe.write(tmp_path / "out.jsonl", [run("level", 0, [0.5], [9.0, 8.5])], tokens=100)
    figures = {(f["level"], f["path"]): f for f in read(tmp_path / "out.jsonl")[1]}
    assert len(figures) == 3 and figures["bf16_mixed", "level"]["ms"] == pytest.approx(500.0)


def table(tmp_path, monkeypatch, runs):
    monkeypatch.setattr("sys.argv", ["nemo_recipe"])
    monkeypatch.setattr(nemo_tables, "RESULTS", tmp_path)
    nemo_recipe.write(tmp_path / "nemo_recipe_h200.jsonl", runs, tokens=100)
    return nemo_tables.nemo_recipe()


def test_table_has_the_distance_of_losses_and_what_failed(tmp_path, monkeypatch):
    made = table(tmp_path, monkeypatch, RUNS)
    assert "is 2.00 to 2.00 × as fast" in made and "further than 0.2500 from" in made
    rows = [line.split() for line in made.splitlines() if line.startswith("``bf16_mixed``")]
    assert rows[0][1:] == ["500", "1,000", "1,000", "+0.00"] and rows[1][1:] == ["8.0000", "8.2500", "8.2500", "0.2500"]
    assert made.count("TypeError") == 2 and "does not train" not in made


def test_sentence_names_the_level_at_which_nemos_plugin_does_not_train(tmp_path, monkeypatch):
    stuck = [run("nemo", 0, [0.2], [9.0, 9.0], "fp16_mixed"), run("level", 0, [0.1], [9.0, 3.0], "fp16_mixed")]
    made = table(tmp_path, monkeypatch, RUNS + stuck).replace("\n", " ")
    assert "further than 0.2500 from" in made  # without the distance of 6 at fp16_mixed
    assert "but at ``fp16_mixed``, where NeMo's plugin does not train" in made


def test_sentence_of_speeds_tells_nemos_settings_from_the_defaults(tmp_path, monkeypatch):
    level = "bf16_with_fp8_current_scaling_mixed"
    fp8 = [run(path, 0, [s], [9.0, 8.0], level) for path, s in (("nemo", 0.3), ("same", 0.3), ("level", 0.1))]
    made = table(tmp_path, monkeypatch, RUNS + fp8).replace("\n", " ")
    assert "is 1.00 to 2.00 × as fast" in made and "and 2.00 to 3.00 × with its defaults" in made

"""The documents say what the project does: their tables and commands are the ones that are measured and run."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.rst").read_text()


def test_tables_are_made_from_the_chart_and_the_results():
    from benchmarks.tables import DOCUMENTS, TABLES, fill

    texts = [document.read_text() for document in DOCUMENTS]
    for text in texts:
        assert fill(text) == text, "run python -m benchmarks.tables --write"
    for name in TABLES:  # each stands somewhere
        assert sum(text.count(f".. {name} begins") for text in texts) == 1


def test_ci_runs_the_readme_s_test_command():
    (command,) = re.findall(r"^ +(python3 -m venv .*pytest.*)$", README, re.M)
    _, install, test = command.replace(".venv/bin/", '"$venv"/bin/').split(" && ")
    ci = (ROOT / ".ci" / "run").read_text().splitlines()
    assert ci.index(install) < ci.index(test)
    assert not any("PATH" in line for line in ci)  # nor does the README activate the environment


def test_every_result_starts_with_its_origin():
    from benchmarks.record import lines, read

    files = sorted((ROOT / "benchmarks" / "results").glob("*.jsonl"))
    assert files
    for file in files:
        origins, figures = read(file)
        assert lines(file)[0] == origins[0] and figures
        assert all({"command", "date", "gpu", "versions"} <= set(origin) for origin in origins)


def test_a_file_written_in_parts_names_the_origin_of_each(tmp_path):
    from benchmarks.record import Record, lines, read

    path = tmp_path / "results.jsonl"
    Record(path).add(benchmark="x", figure=1)
    first = lines(path)
    Record(path, first).add(benchmark="x", figure=2)
    assert lines(path)[:2] == first
    origins, figures = read(path)
    assert lines(path) == [origins[0], figures[0], origins[1], figures[1]]
    assert [f["figure"] for f in figures] == [1, 2]


def test_an_origin_whose_figures_were_all_measured_again_is_left_out(tmp_path):
    from benchmarks.record import Record, lines, read

    path = tmp_path / "results.jsonl"
    Record(path).add(benchmark="x", figure=1)
    Record(path, lines(path)).add(benchmark="x", figure=2)
    origins, figures = read(path)
    Record(path, [*origins, figures[1]]).add(benchmark="x", figure=3)
    assert [f["figure"] for f in read(path)[1]] == [2, 3] and len(read(path)[0]) == 2

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


def test_the_readme_is_short_with_a_picture_of_speed_and_one_of_loss():
    assert README.count("\n") <= 200 and README.count(".. image::") == 2
    assert "benchmarks/results/everyday.png" in README and "benchmarks/results/convergence_h200.png" in README


def test_ci_runs_the_readme_s_test_command():
    (command,) = re.findall(r"^ +(python3 -m venv .*pytest.*)$", README, re.M)
    _, install, test = command.replace(".venv/bin/", '"$venv"/bin/').split(" && ")
    ci = (ROOT / ".ci" / "run").read_text().splitlines()
    assert ci.index(install) < ci.index(test)
    assert not any("PATH" in line for line in ci)  # nor does the README activate the environment
    (first,) = re.findall(r"^ +(python3 -m venv .*pretrain)$", README, re.M)
    assert any(line.endswith(f'&& "$venv"/bin/{first.rpartition(".venv/bin/")[2]})') for line in ci)

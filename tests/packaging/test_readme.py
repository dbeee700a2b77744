"""The README says what the project does: its tables and commands are the ones that are measured and run."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.rst").read_text()


@pytest.mark.parametrize("name", ["chart", "throughput", "parity", "backends"])
def test_tables_are_made_from_the_chart_and_the_results(name):
    from benchmarks.tables import TABLES

    (block,) = re.findall(rf"(?s)\.\. {name} begins\n\n(.*?)\n\n\.\. {name} ends", README)
    assert block == TABLES[name](), "run python -m benchmarks.tables --write"


def test_ci_runs_the_readme_s_test_command():
    (command,) = re.findall(r"^ +(python3 -m venv .*pytest)$", README, re.M)
    install = re.search(r"\.venv/bin/(pip install .*?) &&", command)[1]
    ci = (ROOT / ".ci" / "run").read_text()
    assert install in ci and re.search(r"^pytest$", ci, re.M)


def test_every_result_starts_with_its_origin():
    from benchmarks.record import read

    files = sorted((ROOT / "benchmarks" / "results").glob("*.jsonl"))
    assert files
    for file in files:
        header, figures = read(file)
        assert {"command", "date", "gpu", "versions"} <= set(header) and figures

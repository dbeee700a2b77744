"""The public workflow runs scripts that are there, at the ends of the version ranges of pyproject.toml."""

import re
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).parents[2]
WORKFLOW = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())
JOBS: dict[str, Any] = WORKFLOW["jobs"]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS: dict[str, list[str]] = PROJECT["optional-dependencies"]
MATRIX = JOBS["versions"]["strategy"]["matrix"]["include"]
RUNS = [step["run"] for job in JOBS.values() for step in job["steps"] if "run" in step]


def ends(name: str, lines: list[str]) -> tuple[str, str]:
    """The oldest version of a requirement's range, and the minor version that is the last one below its upper bound."""
    (found,) = [one for one in map(Requirement, lines) if one.name == name]
    bounds = {one.operator: Version(one.version) for one in found.specifier}
    low, high = bounds[">="], bounds["<"]
    return f"{low.major}.{low.minor}.0", f"{high.major}.{high.minor - 1}.*"


@pytest.mark.parametrize("name", ["torch", "lightning"])
def test_the_versions_are_the_ends_of_the_ranges(name: str) -> None:
    oldest, newest = ends(name, PROJECT["dependencies"])
    assert {row[name] for row in MATRIX} == {oldest, newest}


def test_the_versions_of_transformer_engine_are_the_ends_of_its_range() -> None:
    oldest, newest = ends("transformer-engine", EXTRAS["te"])
    assert oldest.rpartition(".")[0] == newest.rpartition(".")[0]  # one minor version, of which pip takes the last
    assert JOBS["transformer-engine"]["strategy"]["matrix"]["te"] == [newest]


def test_the_interpreters_are_those_of_the_classifiers() -> None:
    named = {found[1] for line in PROJECT["classifiers"] if (found := re.search(r":: Python :: (3\.\d+)", line))}
    assert {row["python"] for row in MATRIX} == named == {"3.11", "3.12", "3.13"}
    assert PROJECT["requires-python"] == f">={min(named, key=Version)}"
    script = next(run for run in RUNS if ".ci/versions python" in run)
    assert set(re.findall(r"python(3\.\d+)", script)) == named


def test_each_script_and_test_is_there() -> None:
    words = {
        word for run in RUNS for word in run.split() if re.fullmatch(r"(\.ci|tests|docs|scripts)(/[\w./]+)?", word)
    }
    assert words >= {".ci/run", ".ci/versions", "tests/compat", "docs"}
    assert [word for word in words if not (ROOT / word).exists()] == []


def test_each_extra_is_there() -> None:
    named = {name for run in RUNS for names in re.findall(r"'\.\[([\w,]+)\]'", run) for name in names.split(",")}
    assert named and named <= EXTRAS.keys()


def test_test_has_all_extras_but_those_of_a_gpu() -> None:
    assert "nemo-lowprec[all,docs]" in EXTRAS["test"]
    (line,) = EXTRAS["all"]
    assert Requirement(line).extras == EXTRAS.keys() - {"all", "bench", "docs", "te", "test"}


def test_each_module_of_an_extra_belongs_to_one_that_is_there() -> None:
    from nemo_lowprec.extras import EXTRAS as named

    assert set(named.values()) <= EXTRAS.keys()


@pytest.mark.parametrize("name", ["run", "versions"])
def test_scripts_are_bash_without_mistakes_of_syntax(name: str) -> None:
    assert subprocess.run(["bash", "-n", ROOT / ".ci" / name], check=False).returncode == 0


def test_the_citation_names_this_software() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation.keys() == {"cff-version", "message", "type", "title", "authors", "license"}
    assert citation["cff-version"] == "1.2.0" and citation["type"] == "software"
    assert citation["license"] == PROJECT["license"] and citation["authors"] == [{"name": "nemo_lowprec maintainers"}]

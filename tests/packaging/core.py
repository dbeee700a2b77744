"""A folder of packages in which only the core dependencies are, as ``pip install nemo-lowprec`` leaves it."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from importlib.metadata import distribution
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]


def _needed() -> set[str]:
    """Distributions of the core dependencies, with all that these depend on."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    left, found = [Requirement(line) for line in project["dependencies"]], set()
    while left:
        one = left.pop()
        for extra in ("", *one.extras):
            if (one.name, extra) in found:
                continue
            found.add((one.name, extra))
            needs = map(Requirement, distribution(one.name).requires or ())
            left += [need for need in needs if need.marker is None or need.marker.evaluate({"extra": extra})]
    return {name for name, _ in found}


def make_site(folder: Path) -> Path:
    """Links to the modules and metadata of the core dependencies, and to ``nemo_lowprec``, in ``folder``."""
    folder.mkdir()
    (folder / "nemo_lowprec").symlink_to(ROOT / "nemo_lowprec")
    for name in _needed():
        one = distribution(name)
        for top in {file.parts[0] for file in one.files or ()} - {"..", "__pycache__"}:
            if not (folder / top).exists():
                (folder / top).symlink_to(one.locate_file(top))
    return folder


def run_core(site: Path, code: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run Python code in a process that finds the standard library and the packages in ``site``, and no others."""
    env = {**os.environ, "PYTHONPATH": str(site), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, "-S", "-c", code], cwd=cwd, env=env, capture_output=True, text=True, timeout=300
    )

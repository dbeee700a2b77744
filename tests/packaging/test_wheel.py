"""The built wheel works in an empty folder: recipes and conf are inside, tests and results are not."""

import os
import shutil
import subprocess
import sys
from email.parser import Parser
from pathlib import Path
from zipfile import ZipFile

import pytest

from tests.runs import write_run

ROOT = Path(__file__).parents[2]


def run(*command, cwd, path=None):
    env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | ({"PYTHONPATH": str(path)} if path else {})
    done = subprocess.run([sys.executable, *command], cwd=cwd, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    # A copy: building leaves its own folders beside the sources.
    source = folder / "source"
    ignore = shutil.ignore_patterns("__pycache__", "results")
    shutil.copytree(ROOT / "nemo_lowprec", source / "nemo_lowprec", ignore=ignore)
    for name in ("pyproject.toml", "README.rst", "LICENSE"):
        shutil.copy(ROOT / name, source)
    pip = ("-m", "pip", "--quiet", "wheel", "--no-deps", "--no-index", "--no-build-isolation")
    run(*pip, "--wheel-dir", str(folder), str(source), cwd=folder)
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def site(wheel):
    folder = wheel.parent
    run("-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder / "site"), str(wheel), cwd=folder)
    return folder / "site"


def test_the_wheel_holds_the_package_and_nothing_else(wheel):
    with ZipFile(wheel) as archive:
        names = archive.namelist()
    kinds = {".py", ".typed", ".yaml", ".c", ".html", ".css", ".js"}
    files = {str(path.relative_to(ROOT)) for path in (ROOT / "nemo_lowprec").rglob("*") if path.suffix in kinds}
    files |= {"nemo_lowprec/py.typed"}
    assert len(files) > 400
    assert {name for name in names if ".dist-info/" not in name} == files


def test_the_metadata_say_what_the_wheel_is(wheel):
    with ZipFile(wheel) as archive:
        (path,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        said = Parser().parsestr(archive.read(path).decode())
        assert any(name.endswith("/licenses/LICENSE") for name in archive.namelist())
    assert said["Name"] == "nemo-lowprec" and said["License-Expression"] == "Apache-2.0"
    assert said["Version"] == "0.1.dev0"  # of sources without git
    minors = {11, 12, 13}
    assert {f"Programming Language :: Python :: 3.{minor}" for minor in minors} <= set(said.get_all("Classifier"))
    extras = {"all", "bench", "docs", "megatron", "migrate", "recipes", "report", "te", "test"}
    assert set(said.get_all("Provides-Extra")) == extras
    core = [line for line in said.get_all("Requires-Dist") if "extra ==" not in line]
    assert len(core) == 7 and not any("transformers" in line or "megatron" in line for line in core)


def test_the_version_is_the_installed_one(site, tmp_path):
    code = "import nemo_lowprec, sys; print('importlib.metadata' in sys.modules, nemo_lowprec.__version__)"
    assert run("-S", "-c", code, cwd=tmp_path, path=site) == "False 0.1.dev0\n"  # read when it is asked for


@pytest.mark.slow
def test_pretrain_and_recipes_work_from_the_wheel(site, tmp_path):
    where = run("-c", "import nemo_lowprec; print(nemo_lowprec.__file__)", cwd=tmp_path, path=site)
    assert Path(where.strip()).is_relative_to(site)
    small = [
        "data.max_bytes=300000",
        "data.vocab_size=512",
        "data.data_dir=data/few",
        "trainer.max_steps=2",
        "data.validation_fraction=0.3",
    ]
    out = run("-m", "nemo_lowprec.cli", "pretrain", *small, "data.validation_samples=8", cwd=tmp_path, path=site)
    assert "Validation loss after" in out and list(tmp_path.glob("outputs/*/*/checkpoints/*.ckpt"))
    recipe = "from nemo_lowprec.recipes import tiny, te_fp8; r = tiny.pretrain_recipe(dir='runs', name='t'); "
    out = run("-c", recipe + "r.trainer.plugins = te_fp8(); print(r.trainer.plugins)", cwd=tmp_path, path=site)
    assert "te_fp8" in out


def test_a_report_is_written_from_the_wheel(site, tmp_path):
    write_run(tmp_path / "run")
    run("-m", "nemo_lowprec.cli", "report", "run", cwd=tmp_path, path=site)
    assert "<style>:root" in (tmp_path / "run" / "report.html").read_text()

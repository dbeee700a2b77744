"""The built wheel works in an empty folder: recipes and conf are inside."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.runs import write_run

ROOT = Path(__file__).parents[2]


def run(*command, cwd, path=None):
    env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | ({"PYTHONPATH": str(path)} if path else {})
    done = subprocess.run([sys.executable, *command], cwd=cwd, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    # A copy: building leaves its own folders beside the sources.
    source = folder / "source"
    ignore = shutil.ignore_patterns("__pycache__", "results")
    shutil.copytree(ROOT / "nemo_lowprec", source / "nemo_lowprec", ignore=ignore)
    for name in ("pyproject.toml", "README.rst", "LICENSE"):
        shutil.copy(ROOT / name, source)
    run("-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(folder), str(source), cwd=folder)
    (wheel,) = folder.glob("*.whl")
    run("-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder / "site"), str(wheel), cwd=folder)
    return folder / "site"


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

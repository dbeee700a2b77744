"""Without the extras, levels train, and each command works or says in one sentence what to install."""

import json
from pathlib import Path

import pytest

from nemo_lowprec.cli import _COMMANDS
from nemo_lowprec.extras import EXTRAS
from tests.packaging.core import make_site, run_core
from tests.runs import write_run

ABSENT = (*EXTRAS.keys() - {"jinja2"}, "accelerate", "transformer_engine")  # torch itself needs jinja2

TRAIN = Path(__file__).with_name("train.py").read_text()

COMMANDS = """
import json
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from nemo_lowprec.cli import main

found = {}
for line in json.loads(LINES):
    out, error = StringIO(), StringIO()
    with redirect_stdout(out), redirect_stderr(error):
        try:
            status = main(line.split())
        except SystemExit as stop:
            status = stop.code or 0
    found[line] = [status, out.getvalue(), error.getvalue()]
print(json.dumps(found))
"""

# The command lines that work, each with a part of the output.
WORK = {
    "--help": "pretrain",
    "levels": "msamp_o2",
    "inspect msamp_o2.ckpt": "msamp_o2(",
    "doctor": "nemo-lowprec[recipes]",
    "pretrain --help": "precision=fp16_mixed",
    "run --help": "--factory",
}
# The others, each with the subject, the package and the extra of the sentence.
REFUSED = {
    **dict.fromkeys(
        (
            "pretrain",
            "audit",
            "plan",
            "advise",
            "profile",
            "doctor model=llama_tiny",
            "compare precision=bf16_mixed,msamp_o2",
        ),
        ("This command", "hydra", "recipes"),
    ),
    "run --yes --factory tiny": ("nemo_lowprec.recipes", "nemo_run", "recipes"),
    "prepare-data --out data": ("nemo_lowprec.data", "tokenizers", "recipes"),
    "export msamp_o2.ckpt weights": ("export_checkpoint", "safetensors", "recipes"),
    "report run": ("A page", "vl_convert", "report"),
    "migrate script.py": ("This command", "libcst", "migrate"),
}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_site(tmp_path_factory.mktemp("core") / "site")


@pytest.fixture(scope="module")
def trained(site: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A folder with two checkpoints, and what the process has printed that has trained there."""
    folder = tmp_path_factory.mktemp("trained")
    done = run_core(site, TRAIN, folder)
    assert done.returncode == 0, done.stderr
    return folder, done.stdout


def test_no_package_of_an_extra_is_there(site: Path, tmp_path: Path) -> None:
    code = f"from importlib.util import find_spec; print([name for name in {sorted(ABSENT)} if find_spec(name)])"
    assert run_core(site, code, tmp_path).stdout == "[]\n"


def test_levels_train_in_a_trainer_and_in_a_loop(trained: tuple[Path, str]) -> None:
    _, printed = trained
    assert "msamp_o2 3 True" in printed and "bf16_with_fp8_mixed 3 True" in printed


def test_each_command_works_or_says_what_to_install(site: Path, trained: tuple[Path, str]) -> None:
    folder, _ = trained
    write_run(folder / "run")
    (folder / "script.py").write_text("import torch\n")
    assert {line.split()[0] for line in (WORK | REFUSED) if not line.startswith("-")} == _COMMANDS.keys()
    done = run_core(site, f"LINES = {json.dumps(json.dumps([*WORK, *REFUSED]))}\n{COMMANDS}", folder)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    for line, part in WORK.items():
        status, out, error = found[line]
        assert status == 0 and part in out, (line, out, error)
    for line, (subject, package, extra) in REFUSED.items():
        sentence = f"{subject} needs {package}: pip install 'nemo-lowprec[{extra}]'"
        assert found[line] == [2, "", f"nemo-lowprec {line.split()[0]}: {sentence}\n"]


MODULES = {
    "nemo_lowprec.recipes": ("nemo_lowprec.recipes", "nemo_run"),
    "nemo_lowprec.data.module": ("nemo_lowprec.data", "tokenizers"),
    "nemo_lowprec.transformers": ("nemo_lowprec.transformers", "transformers"),
}
CALLS = {
    "nemo_lowprec.data.TextDataModule": ("nemo_lowprec.data", "tokenizers"),
    "nemo_lowprec.models.CausalLM('llama_tiny', vocab_size=512).configure_model()": ("CausalLM", "transformers"),
    "nemo_lowprec.data.open_indexed('data')": ("Reading Megatron's .bin/.idx data files", "megatron"),
}  # fmt: skip


def test_python_raises_an_import_error_that_says_what_to_install(site: Path, tmp_path: Path) -> None:
    calls = [f"__import__('{name}')" for name in MODULES] + [*CALLS]
    code = (
        "import json, nemo_lowprec.data, nemo_lowprec.models\nsaid = []\n"
        f"for call in {calls!r}:\n  try: eval(call)\n  except ImportError as error: said.append(str(error))\n"
        "print(json.dumps(said))"
    )
    done = run_core(site, code, tmp_path)
    assert done.returncode == 0, done.stderr
    for said, (user, package) in zip(json.loads(done.stdout), (MODULES | CALLS).values(), strict=True):
        assert said == f"{user} needs {package}: pip install 'nemo-lowprec[{EXTRAS[package]}]'"


def test_a_missing_package_of_no_extra_stays_python_s_own_error() -> None:
    from nemo_lowprec.extras import needs_extras

    with pytest.raises(ModuleNotFoundError, match="No module named 'a_package_of_nobody'"), needs_extras("A test"):
        import a_package_of_nobody  # noqa: F401

"""What ``nemo-lowprec run`` says before nemo_run is imported."""

import inspect
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from typer.main import get_command

from nemo_lowprec import run_arguments
from nemo_lowprec.recipes import RECIPES
from nemo_lowprec.run_arguments import check_run_arguments, run_help
from nemo_lowprec.train import pretrain

HEAVY = ("torch", "lightning", "transformers", "megatron", "nemo_run", "fiddle", "hydra")
CODE = (
    "import sys\nfrom nemo_lowprec.run_arguments import check_run_arguments, run_help\nprint(run_help())\n"
    "try: check_run_arguments(sys.argv[1:])\nexcept ValueError as error: print(error)\n"
    f"print([m for m in {HEAVY!r} if m in sys.modules])"
)


def test_help_and_a_typo_import_nothing_heavy(tmp_path: Path) -> None:
    command = [sys.executable, "-c", CODE, "--yes", "trainer.plugins=msamp_o9"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert "Unknown precision level 'msamp_o9'" in done.stdout and done.stdout.endswith("\n[]\n")


def test_help_names_the_recipes_and_fits_the_screen() -> None:
    text = run_help()
    assert all(f"\n  {name} " in text for name in RECIPES) and "--yes " in text and "nemorun lowprec pretrain" in text
    assert max(map(len, text.splitlines())) <= 80


def test_recipes_are_those_of_nemo_run() -> None:
    assert list(run_arguments.RECIPES) == list(RECIPES)
    for name, (level, _) in run_arguments.RECIPES.items():
        assert RECIPES[name]().trainer.plugins.__fn_or_cls__.__name__ == level
        assert tuple(inspect.signature(RECIPES[name]).parameters) == run_arguments.RECIPE_ARGUMENTS
    assert (*inspect.signature(pretrain).parameters, "run") == run_arguments.SETTINGS


def test_options_are_those_of_nemo_run() -> None:
    app = typer.Typer()
    pretrain.cli_entrypoint.cli(app)
    flags, valued = {"--help"}, set()
    for option in get_command(app).params:
        (flags if option.is_flag else valued).update([*option.opts, *option.secondary_opts])
    assert flags == run_arguments.FLAGS
    valued.discard("-y")  # --yaml has it too, and --yes gets it
    assert valued == {*run_arguments.VALUED, *filter(None, run_arguments.VALUED.values())}


@pytest.mark.parametrize(
    "line",
    [
        "--factory tiny trainer.plugins=bf16_with_fp8_mixed trainer.plugins.fp8_margin=1",
        "-f tiny(max_steps=5,dir=runs) trainer.max_steps=2 model.lr*=2",
        "--factory=llama3_8b trainer.strategy=lowprec_sharded trainer.callbacks[0].save_top_k=2",
        "trainer.plugins=msamp_o2(half=fp16) trainer.plugins.fp8_margin=1 ckpt_path=last",
        "--factory my.own_recipe trainer.plugins.anything=1",
        "trainer.plugins=my.own_plugin trainer.plugins.anything=1",
        "model=my.own_model model.width=3 trainer.callbacks[0].save_top_k=2 trainer.logger[0].name=x",
        "trainer.plugins=None run.executor=local --verbose --name x",
        "--yaml recipe.yaml trainer.plugins.anything=1",
    ],
)
def test_what_may_be_right_is_let_through(line: str) -> None:
    check_run_arguments(["--yes", *line.split()])


@pytest.mark.parametrize(
    ("line", "kind", "message"),
    [
        ("--factory llama9", ValueError, r"Unknown recipe 'llama9'. Choose one of: tiny,.* Did you mean 'llama3_8b'\?"),
        ("-f tiny(max_step=5)", TypeError, r"tiny has no argument 'max_step'. Did you mean 'max_steps'\?"),
        ("--factory tiny(", ValueError, "must be the name of a recipe"),
        ("--factory", ValueError, "--factory needs a value"),
        ("--factroy tiny", TypeError, r"no option '--factroy'. Did you mean '--factory'\?"),
        ("trainer.plugins=msamp_o9", ValueError, r"Choose one of: fp16_amp, .* Did you mean 'msamp_o\d'\?"),
        ("trainer.plugins.fp8_margn=1", TypeError, r"bf16_with_fp8_mixed has no .* Did you mean 'fp8_margin'\?"),
        ("trainer.plugins=msamp_o2(fp8_margn=1)", TypeError, r"msamp_o2 has no argument 'fp8_margn'. It takes: fp8,"),
        ("--factory llama3_8b trainer.plugins.fp8_margin=1", TypeError, "bf16_mixed takes no 'fp8_margin'. Levels"),
        ("trainr.max_steps=5", TypeError, r"no setting 'trainr.max_steps'. Did you mean 'trainer'\?"),
        ("trainer.max_step=5", TypeError, r"no setting 'trainer.max_step'. Did you mean 'max_steps'\?"),
        ("model.lrr=5", TypeError, r"no setting 'model.lrr'. Did you mean 'lr'\?"),
        ("data.seq_lenght=5", TypeError, r"no setting 'data.seq_lenght'. Did you mean 'seq_length'\?"),
        ("executor=local", TypeError, r"Did you mean 'run.executor'\?"),
        ("tiny", ValueError, "'tiny' is no setting: write --factory tiny"),
        ("trainer.max_steps", ValueError, "write trainer.max_steps=VALUE"),
        ("trainer.max_steps=", ValueError, "'trainer.max_steps=' is no NAME=VALUE"),
        ("trainer.plugins.fp8=e4m3 trainer.plugins=msamp_o2", ValueError, "which replaces it: write it after"),
    ],
)
def test_mistake_is_one_sentence(line: str, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message) as caught:
        check_run_arguments(["--yes", *line.split()])
    assert "\n" not in str(caught.value)


def test_known_arguments_are_those_of_the_recipes_classes() -> None:

    from lightning.pytorch import Trainer

    from nemo_lowprec.data import TextDataModule
    from nemo_lowprec.models import CausalLM, MegatronGPT

    classes = {"model": (CausalLM, MegatronGPT), "data": (TextDataModule,), "trainer": (Trainer,)}
    for part, kinds in classes.items():
        taken = {name for kind in kinds for name in inspect.signature(kind).parameters}
        assert run_arguments.arguments_of_recipes(part) == taken


def test_factories_of_a_workspace_file_are_the_user_s(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    line = ["--yes", "--factory", "mine", "trainer.plugins=my_level", "trainer.plugins.anything=1"]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NEMORUN_HOME", str(tmp_path / "home"))
    with pytest.raises(ValueError, match="Unknown recipe 'mine'"):
        check_run_arguments(line)
    (tmp_path / "workspace.py").touch()
    check_run_arguments(line)


def test_question_that_nobody_can_answer_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"Add --yes: .* no terminal"):
        check_run_arguments(["trainer.max_steps=2"])
    for option in ("--yes", "-y", "--dryrun", "--to-yaml=recipe.yaml"):
        check_run_arguments([option, "trainer.max_steps=2"])
    monkeypatch.setenv("WORLD_SIZE", "2")
    check_run_arguments(["trainer.max_steps=2"])

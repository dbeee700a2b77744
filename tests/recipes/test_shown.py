"""What is printed of a recipe before it runs."""

import re

import nemo_run as run
import pytest
from nemo_run.cli.cli_parser import parse_cli_args

from nemo_lowprec.cli import main
from nemo_lowprec.recipes import RECIPES
from nemo_lowprec.recipes.shown import show_recipe


@pytest.mark.parametrize("name", RECIPES)
def test_values_are_shown_as_the_command_line_takes_them(name: str, capsys: pytest.CaptureFixture) -> None:
    recipe = RECIPES[name]()
    show_recipe(recipe)
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    found = dict(line.split(" = ", 1) for line in lines)
    assert found["trainer.max_steps"] == str(recipe.trainer.max_steps)
    assert found["trainer.plugins"] == recipe.trainer.plugins.__fn_or_cls__.__name__
    values = [f"{path}={value}" for path, value in found.items() if not re.fullmatch(r"[A-Z]\w+", value)]
    values.remove(f"trainer.plugins={found['trainer.plugins']}")
    values = [value for value in values if not value.endswith("=''")]
    assert len(values) > 20
    show_recipe(parse_cli_args(RECIPES[name](), values))
    assert capsys.readouterr().out.splitlines() == lines


def test_other_processes_of_a_machine_show_nothing(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture):
    monkeypatch.setenv("LOCAL_RANK", "1")
    show_recipe(RECIPES["tiny"]())
    assert capsys.readouterr().out == ""


def test_executor_is_shown_by_nemo_run(capsys: pytest.CaptureFixture) -> None:
    show_recipe(RECIPES["tiny"](), run.LocalExecutor(ntasks_per_node=3))
    assert "ntasks_per_node=3" in capsys.readouterr().out


def test_dry_run_shows_the_recipe_and_ends(capsys: pytest.CaptureFixture) -> None:
    assert main(["run", "--dryrun", "--factory", "tiny", "trainer.plugins=msamp_o2", "trainer.plugins.half=fp16"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("model = CausalLM\n") and "trainer.plugins = msamp_o2\ntrainer.plugins.half = fp16\n" in out
    assert "Launching" not in out

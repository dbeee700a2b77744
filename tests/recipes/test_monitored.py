"""The monitor in recipes of nemo_run, and on nemo_run's command line."""

from pathlib import Path
from typing import Any

import fiddle as fdl
import nemo_run as run
import pytest

from nemo_lowprec import PrecisionMonitor
from nemo_lowprec.cli import main
from nemo_lowprec.recipes import precision_monitor, tiny
from nemo_lowprec.report.monitor import read_run
from tests.recipes.test_recipes import small


@pytest.mark.parametrize("way", ["argument", "setting", "callback"])
def test_a_recipe_is_watched_in_its_level_s_folder(way: str, data_dir: Path, tmp_path: Path) -> None:
    recipe = small(data_dir, tmp_path)
    if way == "argument":
        recipe.monitor = 2
    elif way == "setting":
        recipe.monitor = precision_monitor(every_n_steps=2)
    else:
        recipe.trainer.callbacks.append(precision_monitor(every_n_steps=2))
    run.run(recipe, executor=run.LocalExecutor(), direct=True)
    assert read_run(tmp_path / "run" / "bf16_with_fp8_mixed").about["every_n_steps"] == 2


def test_the_factory_takes_the_arguments_of_the_callback(tmp_path: Path) -> None:
    made = fdl.build(precision_monitor(every_n_steps=7, folder=str(tmp_path)))
    assert isinstance(made, PrecisionMonitor) and made.every_n_steps == 7
    assert fdl.build(precision_monitor()).every_n_steps == PrecisionMonitor().every_n_steps
    assert tiny.pretrain_recipe().monitor is False and tiny.pretrain_recipe(monitor=True).monitor is True


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        (["monitor=True"], "monitor = True\n"),
        (["monitor=10"], "monitor = 10\n"),
        (["monitor=precision_monitor", "monitor.every_n_steps=10"], "monitor.every_n_steps = 10\n"),
        (["monitor=precision_monitor(every_n_steps=10)"], "monitor.every_n_steps = 10\n"),
        (["--factory", "tiny(monitor=10)"], "monitor = 10\n"),
    ],
)
def test_the_command_line_reads_it(words: list[str], shown: str, capsys: pytest.CaptureFixture) -> None:
    assert main(["run", "--dryrun", *words]) == 0
    assert shown in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["monitor=often"], "Unknown monitor 'often'. There are: precision_monitor, True, False."),
        (["monitor.every_n_steps=9"], "monitor is False. Put monitor=precision_monitor before it."),
        (["monitor=precision_monitor(every=9)"], "precision_monitor has no argument 'every'."),
    ],
)
def test_mistakes_are_one_sentence(words: list[str], message: str, capsys: Any) -> None:
    assert main(["run", "--yes", *words]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1

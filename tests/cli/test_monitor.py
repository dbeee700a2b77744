"""The group ``monitor`` of ``nemo-lowprec pretrain``."""

import inspect
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from nemo_lowprec.cli import main
from nemo_lowprec.conf.choices import CONF_DIR
from nemo_lowprec.report.monitor import PrecisionMonitor, read_run
from tests.cli.test_cli import TINY


@pytest.fixture
def tiny(data_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.chdir(tmp_path)
    return [*TINY, f"data.train_prefix={data_dir / 'train'}", f"data.validation_prefix={data_dir / 'validation'}"]


def test_a_monitored_run_has_its_file_in_the_folder_of_the_run(
    tiny: list[str], tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    assert main(["pretrain", *tiny, "monitor=on", "monitor.every_n_steps=3", "trainer.max_steps=6"]) == 0
    (folder,) = tmp_path.glob("outputs/*/*")
    assert read_run(folder).steps == [2, 3, 6] and read_run(folder).ended
    assert f"{folder.relative_to(tmp_path)}/monitor.jsonl" in capsys.readouterr().out
    assert "monitor/sqnr_min/input" in (folder / "csv" / "metrics.csv").read_text().splitlines()[0]


def test_runs_of_a_sweep_have_a_file_each(tiny: list[str], tmp_path: Path) -> None:
    sweep = ["-m", "precision=bf16_mixed,bf16_with_fp8_mixed", "trainer.max_steps=2", "logger=none", "monitor=on"]
    assert main(["pretrain", *tiny, *sweep]) == 0
    found = {path.parent.name: read_run(path.parent) for path in tmp_path.rglob("monitor.jsonl")}
    assert {name: run.about["level"] for name, run in found.items()} == {
        "0_bf16_mixed": "bf16_mixed", "1_bf16_with_fp8_mixed": "bf16_with_fp8_mixed",
    }  # fmt: skip
    assert all(run.steps == [2] for run in found.values())


def test_a_run_is_not_monitored_by_itself(tiny: list[str], tmp_path: Path) -> None:
    assert main(["pretrain", *tiny, "trainer.max_steps=1", "logger=none"]) == 0
    assert not list(tmp_path.rglob("monitor.jsonl"))


def test_the_choice_on_lists_the_arguments_and_defaults_of_the_callback() -> None:
    listed = OmegaConf.load(CONF_DIR / "monitor" / "on.yaml")
    arguments = inspect.signature(PrecisionMonitor).parameters
    assert {*arguments, "_target_"} == set(listed)
    assert listed.every_n_steps == arguments["every_n_steps"].default


def test_help_lists_the_group_of_pretrain_alone(capsys: pytest.CaptureFixture) -> None:
    for command, lists in (("pretrain", True), ("audit", False), ("plan", False), ("advise", False)):
        assert main([command, "--help"]) == 0
        printed = capsys.readouterr().out
        assert ("\n  monitor     off, on\n" in printed) == lists and ("monitor=on" in printed) == lists


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["pretrain", "monitor=yes"], "Unknown monitor 'yes'. Choose one of: off, on."),
        (["pretrain", "monitor.every_n_steps=9"], "is an argument of the monitor, which is off: add monitor=on."),
        (
            ["pretrain", "monitor=on", "monitor.every_n_steps=0"],
            "monitor.every_n_steps=0 must be an integer",
        ),
        (
            ["pretrain", "monitor=on", "monitor.every=9"],
            "There is no setting 'monitor.every'. There are:",
        ),
        (["audit", "monitor=on"], "audit reads no monitor, which is a group of pretrain."),
        (["plan", "monitor.every_n_steps=9"], "plan reads no monitor, which is a group of pretrain."),
    ],
)
def test_mistakes_are_one_sentence(
    arguments: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert message in error and len(error.splitlines()) == 1

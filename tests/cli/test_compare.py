"""``nemo-lowprec compare``: which trainings it starts, what it does when it is called again, and what it says."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from nemo_lowprec.cli import main
from nemo_lowprec.conf import compare_job
from nemo_lowprec.report.monitor.runs import read_run
from tests.runs import write_run

SETTINGS = ["precision=bf16_mixed,msamp_o2", "seeds=2", "output_dir=out", "trainer.max_steps=60"]


class Trainer:
    """In place of the processes that train: writes the file of the run that a command line names.

    Attributes:
        commands: the words behind ``pretrain`` of each training that was started.
        before: called with a run's folder before its file is written; may raise.
        ended: whether a training ends in order.
    """

    def __init__(self) -> None:
        self.commands: list[list[str]] = []
        self.before: Callable[[str], None] = lambda name: None
        self.ended: Callable[[str], bool] = lambda name: True

    def __call__(self, command: list[str], check: bool) -> Any:
        words = command[command.index("pretrain") + 1 :]
        self.commands.append(words)
        given = dict(word.split("=", 1) for word in words)
        folder = Path(given["output_dir"])
        self.before(folder.name)
        seed = int(given["seed"])
        ended = self.ended(folder.name)
        write_run(folder, given["precision"], steps=60, every=5, seed=seed, ended=ended)
        return SimpleNamespace(returncode=0 if ended else 1)

    @property
    def started(self) -> list[str]:
        """The names of the runs' folders."""
        return [Path(dict(w.split("=", 1) for w in words)["output_dir"]).name for words in self.commands]


@pytest.fixture
def trainer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Trainer:
    monkeypatch.chdir(tmp_path)
    found = Trainer()
    monkeypatch.setattr(compare_job, "subprocess", SimpleNamespace(run=found))
    return found


def test_every_level_is_trained_with_every_seed_and_compared(trainer: Trainer, capsys: pytest.CaptureFixture) -> None:
    assert main(["compare", *SETTINGS]) == 0
    assert trainer.started == ["bf16_mixed_1", "msamp_o2_1", "bf16_mixed_2", "msamp_o2_2"]
    folder = "out/msamp_o2_1"
    own = ["precision=msamp_o2", "seed=1", f"output_dir={folder}", f"hydra.run.dir={folder}"]
    assert trainer.commands[1] == ["trainer.max_steps=60", *own, "monitor=on", "ckpt_path=last"]
    printed = capsys.readouterr().out
    assert "Run 1 of 4: bf16_mixed, seed 1" in printed and "Levels beside bf16_mixed" in printed
    assert printed.rstrip().endswith("out/compare.html")
    assert "msamp_o2_2" in Path("out/compare.html").read_text()


def test_a_comparison_that_was_interrupted_goes_on_where_it_was(
    trainer: Trainer, capsys: pytest.CaptureFixture
) -> None:
    def interrupted(name: str) -> None:
        if name == "bf16_mixed_2":
            raise KeyboardInterrupt

    trainer.before = interrupted
    trainer.ended = lambda name: name != "msamp_o2_1"  # this one was killed
    assert main(["compare", *SETTINGS]) == 130
    assert "The same command with output_dir=out goes on where it was." in capsys.readouterr().err
    trainer.commands.clear()
    trainer.before, trainer.ended = lambda name: None, lambda name: True
    assert main(["compare", *SETTINGS]) == 0
    assert trainer.started == ["msamp_o2_1", "bf16_mixed_2", "msamp_o2_2"]
    assert "1 of 4 runs in out have ended and are not trained again." in capsys.readouterr().out
    trainer.commands.clear()
    assert main(["compare", *SETTINGS]) == 0 and trainer.commands == []


def test_more_seeds_and_levels_join_a_comparison(trainer: Trainer) -> None:
    assert main(["compare", *SETTINGS]) == 0
    trainer.commands.clear()
    more = ["precision=bf16_mixed,msamp_o2,te_fp8", "seeds=1,3", *SETTINGS[2:]]
    assert main(["compare", *more]) == 0
    assert trainer.started == ["te_fp8_1", "bf16_mixed_3", "msamp_o2_3", "te_fp8_3"]


def test_other_settings_do_not_join_a_comparison(trainer: Trainer, capsys: pytest.CaptureFixture) -> None:
    assert main(["compare", *SETTINGS]) == 0
    trainer.commands.clear()
    assert main(["compare", *SETTINGS, "model.lr=1e-4"]) == 2
    error = capsys.readouterr().err
    assert "out holds a comparison with trainer.max_steps=60: name another output_dir." in error
    assert trainer.commands == []


def test_a_training_that_fails_is_named_and_the_others_are_compared(
    trainer: Trainer, capsys: pytest.CaptureFixture
) -> None:
    trainer.ended = lambda name: name != "msamp_o2_2"
    assert main(["compare", *SETTINGS]) == 2
    told = capsys.readouterr()
    assert "1 of 4 runs have not ended: msamp_o2_2. The same command with output_dir=out trains them again." in told.err
    assert "Levels beside bf16_mixed" in told.out and Path("out/compare.html").exists()


def test_without_a_folder_a_comparison_has_one_of_its_own(trainer: Trainer, tmp_path: Path) -> None:
    assert main(["compare", "precision=bf16_mixed,msamp_o2"]) == 0
    (folder,) = tmp_path.glob("outputs/compare/*")
    assert sorted(path.name for path in folder.iterdir()) == [
        "bf16_mixed_1", "compare.html", "compare.json", "msamp_o2_1"
    ]  # fmt: skip


def test_runs_that_are_there_are_compared(trainer: Trainer, capsys: pytest.CaptureFixture, tmp_path: Path) -> None:
    folders = [str(write_run(tmp_path / name, level)) for name, level in (("a", "msamp_o2"), ("b", "bf16_mixed"))]
    assert main(["compare", *folders]) == 0
    assert trainer.commands == [] and "Levels beside bf16_mixed" in capsys.readouterr().out
    assert (tmp_path / "compare.html").exists()
    assert main(["compare", "--out", "pages/a.html", *folders]) == 0
    assert (tmp_path / "pages" / "a.html").exists()


def test_one_run_or_a_folder_without_a_run_is_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    folder = str(write_run(tmp_path / "run"))
    for folders, message in (
        ([folder], "compare needs the folders of two runs or more."),
        ([folder, str(tmp_path)], "has no monitor.jsonl"),
    ):
        assert main(["compare", *folders]) == 2
        error = capsys.readouterr().err
        assert message in error and len(error.splitlines()) == 1


def test_nemo_run_takes_the_trainings_as_tasks(trainer: Trainer, monkeypatch: pytest.MonkeyPatch) -> None:
    import nemo_run

    tasks: list[tuple[str, str]] = []

    class Experiment:
        def __init__(self, title: str) -> None:
            assert title == "compare"

        def __enter__(self) -> Any:
            return self

        def __exit__(self, *_: object) -> None:
            pass

        def add(self, task: Any, executor: Any, name: str) -> None:
            assert isinstance(executor, nemo_run.LocalExecutor)
            tasks.append((name, task.inline))

        def run(self, sequential: bool, detach: bool, tail_logs: bool) -> None:
            assert sequential and not detach
            for _, inline in tasks:
                trainer(inline.split(), check=False)

    monkeypatch.setattr(nemo_run, "Experiment", Experiment)
    assert main(["compare", "--nemo-run", *SETTINGS]) == 0
    assert [name for name, _ in tasks] == trainer.started
    assert trainer.started == ["bf16_mixed_1", "msamp_o2_1", "bf16_mixed_2", "msamp_o2_2"]
    assert all(inline.startswith(f"cd {Path.cwd()} && ") for _, inline in tasks)


@pytest.mark.slow
def test_two_levels_are_really_trained_and_one_goes_on_from_its_checkpoint(
    data_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    size = "hidden_size:32,intermediate_size:64,num_hidden_layers:1,num_attention_heads:2,num_key_value_heads:1"
    settings = [
        f"+model.config={{{size}}}",
        "data=megatron",
        f"data.train_prefix={data_dir / 'train'}",
        f"data.validation_prefix={data_dir / 'validation'}",
        "data.seq_length=32",
        "data.micro_batch_size=4",
        "data.num_workers=0",
        "data.validation_samples=8",
        "trainer.accelerator=cpu",
        "trainer.max_steps=6",
        "trainer.val_check_interval=2",
        "logger=none",
    ]
    levels = ["precision=bf16_mixed,bf16_with_fp8_mixed", "output_dir=out"]
    assert main(["compare", *levels, *settings]) == 0
    first = read_run("out/bf16_with_fp8_mixed_1")
    assert first.about["command"].startswith("nemo-lowprec pretrain ")  # a shell takes it
    assert first.ended and first.about["seed"] == 1 and sorted(first.loss) == [1, 2, 3, 4, 5, 6]
    file = first.folder / "monitor.jsonl"
    lines = file.read_text().splitlines()
    file.write_text(
        "\n".join(line for line in lines if '"record":"end"' not in line) + "\n"
    )  # as if it had been killed
    assert main(["compare", *levels, *settings]) == 0
    told = capsys.readouterr().out
    assert "1 of 2 runs in out have ended and are not trained again." in told and "Levels beside bf16_mixed" in told
    again = read_run("out/bf16_with_fp8_mixed_1")
    assert again.ended and again.loss == first.loss and len(again.attempts) == 1  # no step was left to train

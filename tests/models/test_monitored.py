"""``pretrain(monitor=...)``."""

from pathlib import Path
from typing import Any

import pytest

from nemo_lowprec.report.monitor import PrecisionMonitor, read_run
from nemo_lowprec.train import pretrain
from tests.models.test_train import parts


@pytest.mark.parametrize(
    ("monitor", "steps"), [(True, [2]), (3, [2, 3, 6]), (PrecisionMonitor(4), [2, 4, 8]), (1, [*range(1, 9)])]
)
def test_the_run_is_watched_and_the_result_says_where(
    monitor: Any, steps: list[int], data_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    made = parts(data_dir, tmp_path / "run" / "checkpoints", max_steps=8)
    callbacks = list(made["trainer"].callbacks)
    result = pretrain(**made, monitor=monitor)
    assert made["trainer"].callbacks == callbacks
    assert result.monitor == "run/monitor.jsonl" and "Monitor " in capsys.readouterr().out
    run = read_run(tmp_path / "run")
    assert run.steps == steps and run.ended and run.loss and len(run.validations) == 1 and run.rates[-1][3] > 0


def test_without_a_monitor_there_is_no_file(data_dir: Path, tmp_path: Path, capsys: Any) -> None:
    assert pretrain(**parts(data_dir, tmp_path / "run" / "checkpoints")).monitor is None
    assert not list(tmp_path.rglob("monitor.jsonl")) and "Monitor " not in capsys.readouterr().out


def test_the_monitor_of_the_trainer_is_enough(data_dir: Path, tmp_path: Path) -> None:
    made = parts(data_dir, tmp_path / "run" / "checkpoints")
    own = PrecisionMonitor(2)
    made["trainer"].callbacks.append(own)
    result = pretrain(**made, monitor=True)
    assert made["trainer"].callbacks.count(own) == 1 and result.monitor is not None
    assert len(read_run(tmp_path / "run").attempts) == 1 and read_run(tmp_path / "run").steps == [2, 4]


@pytest.mark.parametrize(
    ("monitor", "options", "error"),
    [
        (
            True,
            {"plugins": None},
            ValueError("PrecisionMonitor needs a Trainer with a level of nemo_lowprec"),
        ),
        (0, {}, ValueError("every_n_steps=0 must be a number of steps, at least 1.")),
        (-2, {}, ValueError("every_n_steps=-2 must be a number of steps, at least 1.")),
        ("yes", {}, TypeError("monitor must be a PrecisionMonitor of")),
        (None, {}, TypeError("monitor must be a PrecisionMonitor of")),
    ],
)
def test_bad_values_are_one_sentence(
    monitor: Any, options: dict[str, Any], error: Exception, data_dir: Path, tmp_path: Path
) -> None:
    with pytest.raises(type(error), match=f"^{error}"):
        pretrain(**parts(data_dir, tmp_path, **options), monitor=monitor)
    assert not list(tmp_path.iterdir())


def test_two_distances_are_refused(data_dir: Path, tmp_path: Path) -> None:
    made = parts(data_dir, tmp_path)
    made["trainer"].callbacks.append(PrecisionMonitor(2))
    with pytest.raises(ValueError, match=r"^The Trainer has a PrecisionMonitor among its callbacks"):
        pretrain(**made, monitor=10)

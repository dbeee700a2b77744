"""``nemo-lowprec report``."""

from __future__ import annotations

import builtins
from pathlib import Path
from typing import Any

import pytest

from nemo_lowprec.cli import main
from nemo_lowprec.report.monitor.run_writer import FILE
from nemo_lowprec.report.page import page
from tests.runs import write_run


def test_a_report_is_written_into_the_folder_or_where_the_user_says(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    folder = write_run(tmp_path / "run")
    assert main(["report", str(folder)]) == 0
    assert capsys.readouterr().out.strip() == str(folder / "report.html")
    assert (folder / "report.html").read_text().startswith("<!doctype html>")
    assert main(["report", str(folder), "--out", str(tmp_path / "elsewhere" / "page.html")]) == 0
    assert (tmp_path / "elsewhere" / "page.html").read_bytes() == (folder / "report.html").read_bytes()
    assert sorted(path.name for path in folder.iterdir()) == [FILE, "report.html"]


def without_samples(folder: Path) -> None:
    lines = (folder / FILE).read_text().splitlines()
    (folder / FILE).write_text("\n".join(line for line in lines if '"record":"sample"' not in line))


def empty(folder: Path) -> None:
    (folder / FILE).write_text("")


def another_format(folder: Path) -> None:
    (folder / FILE).write_text((folder / FILE).read_text().replace('"format":1', '"format":9'))


def no_file(folder: Path) -> None:
    (folder / FILE).unlink()


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (without_samples, "has no sample yet: a run takes the first one within 20 steps."),
        (empty, "has no record of a run."),
        (another_format, "has format 9, and this version reads format 1."),
        (no_file, "has no monitor.jsonl: train with monitor=True"),
    ],
)
def test_a_folder_without_a_run_to_show_is_one_sentence(
    spoil: Any, message: str, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    folder = write_run(tmp_path)
    spoil(folder)
    assert main(["report", str(folder)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("nemo-lowprec report: ") and message in error and len(error.splitlines()) == 1
    assert not (folder / "report.html").exists()


@pytest.mark.parametrize("missing", ["jinja2", "vl_convert"])
def test_a_missing_package_is_one_sentence_that_says_what_to_install(
    missing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    folder, imported = write_run(tmp_path), builtins.__import__

    def absent(name: str, *args: Any) -> Any:
        if name == missing:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return imported(name, *args)

    page._library.cache_clear()
    monkeypatch.setattr(builtins, "__import__", absent)
    assert main(["report", str(folder)]) == 2
    error = capsys.readouterr().err
    assert error == f"nemo-lowprec report: A page needs {missing}: pip install 'nemo-lowprec[report]'\n"


def test_a_page_that_cannot_be_written_is_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    folder = write_run(tmp_path / "run")
    (tmp_path / "file").write_text("")
    assert main(["report", str(folder), "--out", str(tmp_path / "file" / "page.html")]) == 2
    assert "could not be written: " in capsys.readouterr().err

"""Runs ``nemo-lowprec migrate`` on a script."""

from collections.abc import Callable
from pathlib import Path

import pytest

from nemo_lowprec.cli import main


@pytest.fixture
def migrated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> Callable[[str], tuple[str, str]]:
    """Returns the source after ``--write``, and stderr; a second migration must find nothing to do."""
    monkeypatch.chdir(tmp_path)

    def migrate(source: str) -> tuple[str, str]:
        path = Path("train.py")
        path.write_text(source)
        assert main(["migrate", "train.py", "--write"]) == 0
        printed = capsys.readouterr()
        assert printed.out == ""
        new = path.read_text()
        assert main(["migrate", "train.py"]) == 0
        assert capsys.readouterr().out == ""
        compile(new, "train.py", "exec")
        return new, printed.err

    return migrate

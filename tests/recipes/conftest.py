"""nemo_run keeps records in a home of its own."""

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def nemo_run_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """nemo_run keeps a record of every run in its home: not in the user's."""
    monkeypatch.setattr("nemo_run.config._NEMORUN_HOME", str(tmp_path / "nemo_run"))

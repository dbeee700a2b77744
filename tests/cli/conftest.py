"""Tests here call commands in their own process."""

from pathlib import Path

import lightning.pytorch  # noqa: F401  its log goes to what is stderr now, and in a test that would be a stream of pytest
import pytest


@pytest.fixture(autouse=True)
def commands_change_logging(logging_as_it_was: None) -> None:
    """Hydra's commands do, for the whole process."""


@pytest.fixture
def nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The working folder is empty."""
    monkeypatch.chdir(tmp_path)

"""Prepared data small enough that a run of a few steps takes a second."""

from pathlib import Path

import pytest

from nemo_lowprec.data import prepare_data

VOCAB_SIZE = 400


@pytest.fixture(scope="session")
def data_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prepared data of 60 short files."""
    folder = tmp_path_factory.mktemp("texts")
    for i in range(60):
        words = " ".join(f"word{(i * 7 + j * j) % 31}" for j in range(150))
        (folder / f"{i:02}.txt").write_text(f"Chapter {i}. {words}\n")
    out = folder.parent / f"{folder.name}_prepared"
    prepare_data(out, source=folder, vocab_size=VOCAB_SIZE, validation_fraction=0.2)
    return out


@pytest.fixture(autouse=True)
def nemo_run_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """nemo_run keeps a record of every run in its home: not in the user's."""
    monkeypatch.setattr("nemo_run.config._NEMORUN_HOME", str(tmp_path / "nemo_run"))

"""Prepared data small enough that a run of a few steps takes a second."""

import logging
import sys
from collections.abc import Iterator
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
def logging_as_it_was() -> Iterator[None]:
    """Undoes what Hydra does to logging, which a process of its own would not notice."""
    root, level, handlers = logging.getLogger(), logging.getLogger().level, logging.getLogger().handlers[:]
    # Hydra's dictConfig closes every handler there is, and absl's (fiddle brings it) closes its stream with it unless
    # that is the real stderr: under pytest it would be the file that pytest captures to.
    absl = sys.modules.get("absl.logging")
    if absl is not None:
        absl.get_absl_handler().python_handler.stream = sys.__stderr__
    yield
    root.handlers[:] = handlers
    root.setLevel(level)

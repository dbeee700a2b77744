"""Hydra changes logging for the whole process."""

import logging
import sys
from collections.abc import Iterator

import lightning.pytorch  # noqa: F401  its log goes to what is stderr now, and in a test that would be a stream of pytest
import pytest


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

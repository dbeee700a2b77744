"""A Chromium for the tests of a file. No file's Chromium outlives its tests: playwright's event loop runs with it."""

from collections.abc import Iterator
from typing import Any

import pytest

from benchmarks.browser import browser


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    with browser() as found:
        yield found

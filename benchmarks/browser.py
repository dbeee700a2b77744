"""A headless Chromium of the system, and pages opened in it as from a mail: a file, and no network."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

__all__ = ["Opened", "browser", "executable", "opened"]

_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


def executable() -> str:
    """The path of Chromium.

    Raises:
        RuntimeError: it is not installed.
    """
    found = next(filter(None, map(shutil.which, _NAMES)), None)
    if found is None:
        raise RuntimeError(
            "Pages are tested in Chromium, which is not installed: apt-get install -y --no-install-recommends chromium."
        )
    return found


@contextmanager
def browser() -> Iterator[Any]:
    """A running Chromium, without a window and offline."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        # Chromium refuses its sandbox to the root of a container.
        chromium = playwright.chromium.launch(executable_path=executable(), args=["--no-sandbox", "--disable-gpu"])
        try:
            yield chromium
        finally:
            chromium.close()


class Opened:
    """A page that is open.

    Attributes:
        page: of playwright.
        said: what the page has written to the console, warnings and uncaught errors included.
        requests: URLs that the page has asked for.
    """

    def __init__(self, page: Any) -> None:
        self.page = page
        self.said: list[str] = []
        self.requests: list[str] = []
        page.on("console", lambda message: self.said.append(f"{message.type}: {message.text}"))
        page.on("pageerror", lambda error: self.said.append(f"error: {error}"))
        page.on("request", lambda request: self.requests.append(request.url))

    def drawn(self, times: int = 1) -> None:
        """Wait until the charts have been drawn so many times."""
        self.page.wait_for_function(f"Number(document.body.dataset.drawn) >= {times}")

    def cells(self, panel: str) -> int:
        """The number of cells of a heatmap, in SVG."""
        return int(self.page.locator(f"[data-panel={panel}] .mark-rect.layer_0_marks > path").count())


@contextmanager
def opened(chromium: Any, path: Path, width: int = 1200, dark: bool = False) -> Iterator[Opened]:
    """Open a file, and wait until the page has drawn its charts."""
    scheme = "dark" if dark else "light"
    page = chromium.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme, offline=True)
    found = Opened(page)
    try:
        page.goto(path.resolve().as_uri())
        found.drawn()
        yield found
    finally:
        page.close()

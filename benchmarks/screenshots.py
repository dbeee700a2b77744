"""Pictures of pages, for the documents.

``python -m benchmarks.screenshots outputs/run/report.html docs/report.png --until layers`` is the page from its top to
the end of the section ``layers``, 1,200 pixels wide; ``--since params --until params`` is one section.
"""

from __future__ import annotations

import argparse
import io
from pathlib import Path

from PIL import Image

from benchmarks.browser import Opened, browser, opened

__all__ = ["MOST_BYTES", "screenshot"]

MOST_BYTES = 250_000  # of a picture
_COLOURS = (None, 256, 128, 64, 32)  # None: all of them
_MARGIN = 24  # pixels below the last section


def screenshot(
    page: Path, out: Path, *, width: int = 1200, dark: bool = False, since: str | None = None, until: str | None = None
) -> None:
    """Write a PNG of a page.

    Args:
        page: an HTML file of ``report`` or ``compare``.
        out: the PNG; of the colours of the page so many that it has at most ``MOST_BYTES``.
        width: of the window, in pixels.
        dark: whether the system is set to dark.
        since: the id of the first section that is shown; None: from the top of the page.
        until: the id of the last section that is shown; None: to the end of the page.

    Raises:
        ValueError: the page has no such section, or a picture of few colours is still too large.
    """
    with browser() as chromium, opened(chromium, page, width, dark) as found:
        top, bottom = 0.0, found.page.evaluate("document.documentElement.scrollHeight")
        if since is not None:
            top, _ = _ends(found, since)
        if until is not None:
            bottom = _ends(found, until)[1] + _MARGIN
        clip = {"x": 0, "y": top, "width": width, "height": bottom - top}
        image = Image.open(io.BytesIO(found.page.screenshot(full_page=True, clip=clip))).convert("RGB")
    for colours in _COLOURS:
        written = io.BytesIO()
        fewer = image if colours is None else image.quantize(colours, dither=Image.Dither.NONE)
        fewer.save(written, "PNG", optimize=True)
        if written.tell() <= MOST_BYTES:
            out.parent.mkdir(parents=True, exist_ok=True)
            out.write_bytes(written.getvalue())
            return
    raise ValueError(f"A picture of {page} is larger than {MOST_BYTES:,} bytes: take --since SECTION, --until SECTION.")


def _ends(found: Opened, section: str) -> tuple[float, float]:
    """Where a section begins and ends, in pixels below the top of the page."""
    place = found.page.locator(f"section#{section}")
    if not place.count():
        raise ValueError(f"The page has no section {section!r}.")
    box = place.bounding_box()
    return box["y"], box["y"] + box["height"]


if __name__ == "__main__":
    parser = argparse.ArgumentParser("python -m benchmarks.screenshots", description=__doc__)
    parser.add_argument("page", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--width", type=int, default=1200)
    parser.add_argument("--dark", action="store_true")
    parser.add_argument("--since", metavar="SECTION")
    parser.add_argument("--until", metavar="SECTION")
    screenshot(**vars(parser.parse_args()))

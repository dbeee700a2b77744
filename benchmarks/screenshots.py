"""Pictures of pages, for the documents.

``python -m benchmarks.screenshots outputs/run/report.html docs/report.png --until layers`` is the page from its top to
the end of the section ``layers``, 1,200 pixels wide.
"""

from __future__ import annotations

import argparse
import io
from pathlib import Path

from PIL import Image

from benchmarks.browser import browser, opened

__all__ = ["MOST_BYTES", "screenshot"]

MOST_BYTES = 250_000  # of a picture
_COLOURS = (256, 128, 64, 32)
_MARGIN = 24  # pixels below the last section


def screenshot(page: Path, out: Path, *, width: int = 1200, dark: bool = False, until: str | None = None) -> None:
    """Write a PNG of a page.

    Args:
        page: an HTML file of ``report`` or ``compare``.
        out: the PNG; of the colours of the page so many that it has at most ``MOST_BYTES``.
        width: of the window, in pixels.
        dark: whether the system is set to dark.
        until: the id of the last section that is shown; None: the whole page.

    Raises:
        ValueError: the page has no such section, or a picture of few colours is still too large.
    """
    with browser() as chromium, opened(chromium, page, width, dark) as found:
        clip = None
        if until is not None:
            section = found.page.locator(f"section#{until}")
            if not section.count():
                raise ValueError(f"{page} has no section {until!r}.")
            box = section.bounding_box()
            clip = {"x": 0, "y": 0, "width": width, "height": box["y"] + box["height"] + _MARGIN}
        image = Image.open(io.BytesIO(found.page.screenshot(full_page=True, clip=clip))).convert("RGB")
    for colours in _COLOURS:
        written = io.BytesIO()
        image.quantize(colours, dither=Image.Dither.NONE).save(written, "PNG", optimize=True)
        if written.tell() <= MOST_BYTES:
            out.parent.mkdir(parents=True, exist_ok=True)
            out.write_bytes(written.getvalue())
            return
    raise ValueError(f"A picture of {page} is larger than {MOST_BYTES:,} bytes: show less of it with --until SECTION.")


if __name__ == "__main__":
    parser = argparse.ArgumentParser("python -m benchmarks.screenshots", description=__doc__)
    parser.add_argument("page", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--width", type=int, default=1200)
    parser.add_argument("--dark", action="store_true")
    parser.add_argument("--until", metavar="SECTION")
    screenshot(**vars(parser.parse_args()))

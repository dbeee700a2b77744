"""The site of docs/: it builds without a warning, every page has its place, and no link or picture leads nowhere."""

from __future__ import annotations

import re
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from benchmarks.tables import MEASURED
from nemo_lowprec import CHART
from tests.documents import DOCS

PAGES = sorted(
    path.relative_to(DOCS).with_suffix("").as_posix() for kind in ("*.rst", "*.ipynb") for path in DOCS.rglob(kind)
)


class Page(HTMLParser):
    """Names of places, and addresses of links and pictures, of a page."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.names: set[str] = set()
        self.links: list[str] = []
        self.images: list[tuple[str, str]] = []
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = {name: value or "" for name, value in attrs}
        self.names.add(found.get("id", ""))
        if tag == "a" and "href" in found:
            self.links.append(found["href"])
        if tag == "img":
            self.images.append((found["src"], found.get("alt", "")))


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built pages, in this process, which has imported torch."""
    from sphinx.cmd.build import build_main

    out = tmp_path_factory.mktemp("site")
    warnings = out.parent / "warnings.txt"
    code = build_main(["-W", "--keep-going", "-q", "-w", str(warnings), "-b", "html", str(DOCS), str(out)])
    assert code == 0, warnings.read_text()
    return out


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[Path, Page]:
    return {path.resolve(): Page(path) for path in site.rglob("*.html")}


def test_every_page_is_built_and_in_a_table_of_contents(site: Path, pages: dict[Path, Page]) -> None:
    built = {path.relative_to(site).with_suffix("").as_posix() for path in pages}
    assert built - set(PAGES) == {"genindex", "search"} | ({"py-modindex"} & built) and built >= set(PAGES)
    contents = pages[site.resolve() / "index.html"].links
    assert {f"levels/{name}.html" for name in CHART} <= set(contents)
    assert {f"{name}.html" for name in PAGES} - set(contents) == {"index.html"}


def elsewhere(pages: dict[Path, Page], addresses: str) -> Iterator[tuple[Path, str, Path, str]]:
    """(page, address, file, name of a place) of all addresses that are no other site's."""
    for path, page in pages.items():
        for address in page.links if addresses == "links" else [src for src, _ in page.images]:
            parts = urlsplit(address)
            if not parts.scheme:
                file = (path.parent / unquote(parts.path)).resolve() if parts.path else path
                yield path, address, file, unquote(parts.fragment)


def test_no_link_leads_nowhere(pages: dict[Path, Page]) -> None:
    found = list(elsewhere(pages, "links"))
    dead = [
        (path.name, address)
        for path, address, file, name in found
        if not file.is_file() or (name and file in pages and name not in pages[file].names)
    ]
    assert len(found) > 1000 and not dead
    paths = [urlsplit(link).path for page in pages.values() for link in page.links]
    assert not [path for path in paths if path.endswith((".rst", ".ipynb"))]


def test_every_picture_is_there_with_words_in_its_place(pages: dict[Path, Page]) -> None:
    found = list(elsewhere(pages, "images"))
    assert len(found) > 15 and all(file.is_file() for _, _, file, _ in found)
    assert all(alt for page in pages.values() for _, alt in page.images)


def test_llms_txt_has_a_line_for_each_page(site: Path) -> None:
    text = (site / "llms.txt").read_text()
    lines = dict(re.findall(r"^- \[.+\]\((.+)\.html\): (.+\.)$", text, re.MULTILINE))
    assert sorted(lines) == PAGES and text.startswith("# nemo_lowprec\n\n> ")
    assert all(len(sentence) < 300 for sentence in lines.values())


def test_pictures_come_first_and_tables_open_on_a_click(site: Path) -> None:
    html = (site / "measured.html").read_text()
    tables = re.findall(r"^\.\. (\w+) begins\n\n[^\n].*?\n\n(?:=|\.\. list-table)", MEASURED.read_text(), re.M | re.S)
    folded = re.findall(r'<details class="behind"><summary>Table of \d+ rows.*?</details>', html, re.DOTALL)
    assert len(folded) == html.count('<details class="behind">') > 20
    assert sum(part.count("<table") for part in folded) == html.count("<table") == len(folded)
    assert not any("<img" in part for part in folded) and len(tables) >= len(folded)

"""``llms.txt``: one line a page of the site, with its title, its address and its first sentence (llmstxt.org)."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment


def _pages(env: BuildEnvironment, page: str) -> Iterator[str]:
    """A page and all below it, in the order of the tables of contents."""
    yield page
    for below in env.toctree_includes.get(page, ()):
        yield from _pages(env, below)


def _sentence(page: nodes.document) -> str:
    """The first sentence of a page's prose."""
    prose = (p.astext() for p in page.findall(nodes.paragraph) if isinstance(p.parent, nodes.section))
    return re.split(r"(?<=\.) ", " ".join(next(prose, "").split()))[0]


def _write(app: Sphinx, error: Exception | None) -> None:
    if error is not None or app.builder.name != "html":
        return
    env, root = app.env, app.config.root_doc
    lines = [f"# {app.config.project}", "", f"> {_sentence(env.get_doctree(root))}", ""]
    for page in dict.fromkeys(_pages(env, root)):
        title = env.titles[page].astext()
        lines.append(f"- [{title}]({app.builder.get_target_uri(page)}): {_sentence(env.get_doctree(page))}")
    Path(app.outdir, "llms.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")


def setup(app: Sphinx) -> dict[str, Any]:
    app.connect("build-finished", _write)
    return {"parallel_read_safe": True, "parallel_write_safe": True}

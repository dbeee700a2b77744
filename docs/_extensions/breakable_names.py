"""Lets long names in cells of tables break behind their underscores; copied text is as it was."""

from __future__ import annotations

from typing import Any

from docutils import nodes
from sphinx.application import Sphinx


def let_break(app: Sphinx, doctree: nodes.document, page: str) -> None:
    """Put a place to break behind each underscore."""
    for entry in doctree.findall(nodes.entry):
        for text in [t for t in entry.findall(nodes.Text) if "_" in t]:
            parts: list[nodes.Node] = []
            for part in text.split("_"):
                parts += [nodes.Text(f"{part}_"), nodes.raw("", "<wbr>", format="html")]
            parts[-2:] = [nodes.Text(part)]
            text.parent.replace(text, parts)


def setup(app: Sphinx) -> dict[str, Any]:
    app.connect("doctree-resolved", let_break)
    return {"parallel_read_safe": True, "parallel_write_safe": True}

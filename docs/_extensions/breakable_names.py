"""Lets long names break behind underscores: in cells of tables, titles and the sidebar. Copied text is as it was."""

from __future__ import annotations

import re
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx


def let_break(app: Sphinx, doctree: nodes.document, page: str) -> None:
    """Put a place to break behind each underscore of a table's cells and of titles."""
    for entry in [*doctree.findall(nodes.entry), *doctree.findall(nodes.title)]:
        for text in [t for t in entry.findall(nodes.Text) if "_" in t]:
            parts: list[nodes.Node] = []
            for part in text.split("_"):
                parts += [nodes.Text(f"{part}_"), nodes.raw("", "<wbr>", format="html")]
            parts[-2:] = [nodes.Text(part)]
            text.parent.replace(text, parts)


def let_break_beside(app: Sphinx, page: str, template: str, context: dict[str, Any], doctree: Any) -> None:
    """The same for the titles of other pages, beside the page."""
    tree = context.get("furo_navigation_tree", "")
    context["furo_navigation_tree"] = re.sub(r"(?<=>)[^<]*_[^<]*", lambda m: m[0].replace("_", "_<wbr>"), tree)


def setup(app: Sphinx) -> dict[str, Any]:
    app.connect("doctree-resolved", let_break)
    app.connect("html-page-context", let_break_beside, priority=900)  # behind the theme's own
    return {"parallel_read_safe": True, "parallel_write_safe": True}

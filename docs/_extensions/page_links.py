"""Links between pages, and what GitHub's viewer needs and the site has by itself.

A page links to another one by its file, ```text <measured.rst#faults>`_``, as GitHub's viewer follows links. Here each
becomes a link to the page of the site; a file that is no page is a warning. Lists of contents are left out: the theme
has its own.
"""

from __future__ import annotations

import posixpath
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.transforms import SphinxTransform
from sphinx.util import logging

_log = logging.getLogger(__name__)
_PAGES = (".rst", ".ipynb")


def link_pages(app: Sphinx, doctree: nodes.document, page: str) -> None:
    """Point links to files of pages at the pages."""
    for link in list(doctree.findall(nodes.reference)):
        file, _, place = link.get("refuri", "").partition("#")
        if not file.endswith(_PAGES) or "://" in file:
            continue
        other = posixpath.normpath(posixpath.join(posixpath.dirname(page), posixpath.splitext(file)[0]))
        if other not in app.env.found_docs:
            _log.warning("%s is no page", file, location=link)
            continue
        address = app.builder.get_relative_uri(page, other) + (f"#{place}" if place else "")
        link.update_all_atts({"refuri": address, "internal": True}, replace=True)


class NoContents(SphinxTransform):
    """Takes the list of a page's contents out."""

    default_priority = 800  # behind docutils' own, which fills the list

    def apply(self, **kwargs: Any) -> None:
        for topic in list(self.document.findall(nodes.topic)):
            if "contents" in topic["classes"]:
                topic.parent.remove(topic)
        for title in self.document.findall(nodes.title):
            title.attributes.pop("refid", None)  # of the entry in the list


def setup(app: Sphinx) -> dict[str, Any]:
    app.connect("doctree-resolved", link_pages)
    app.add_transform(NoContents)
    return {"parallel_read_safe": True, "parallel_write_safe": True}

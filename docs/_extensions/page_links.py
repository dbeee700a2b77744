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
from sphinx.transforms.post_transforms import SphinxPostTransform
from sphinx.util import logging

_log = logging.getLogger(__name__)


class PageLinks(SphinxPostTransform):
    """Points links to files of pages at the pages."""

    default_priority = 5

    def run(self, **kwargs: Any) -> None:
        for link in list(self.document.findall(nodes.reference)):
            file, _, place = link.get("refuri", "").partition("#")
            if not file.endswith(".rst") or "://" in file:
                continue
            here = posixpath.dirname(self.env.docname)
            page = posixpath.normpath(posixpath.join(here, file)).removesuffix(".rst")
            if page not in self.env.found_docs:
                _log.warning("%s is no page", file, location=link)
                continue
            own = self.app.builder.get_relative_uri(self.env.docname, page)
            link.update_all_atts({"refuri": own + (f"#{place}" if place else ""), "internal": True}, replace=True)


class NoContents(SphinxTransform):
    """Takes the list of a page's contents out."""

    default_priority = 800  # behind docutils' own, which fills the list

    def apply(self, **kwargs: Any) -> None:
        for topic in list(self.document.findall(nodes.topic)):
            if "contents" in topic["classes"]:
                topic.parent.remove(topic)


def setup(app: Sphinx) -> dict[str, Any]:
    app.add_post_transform(PageLinks)
    app.add_transform(NoContents)
    return {"parallel_read_safe": True, "parallel_write_safe": True}

"""Folds the tables of long pages: the sentence that says what to see, and pictures, stay; tables open on a click.

The pages are named by ``tables_behind`` in ``conf.py``. A table lies between ``.. NAME begins`` and ``.. NAME ends``,
as ``benchmarks/tables.py`` writes it, behind one paragraph. GitHub's viewer shows it as any table.
"""

from __future__ import annotations

from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.transforms import SphinxTransform


class TablesBehind(SphinxTransform):
    """Puts each table, with the commands of its figures, into an element ``details``."""

    default_priority = 500

    def apply(self, **kwargs: Any) -> None:
        if self.env.docname not in self.config.tables_behind:
            return
        for begin in list(self.document.findall(nodes.comment)):
            name, _, word = begin.astext().partition(" ")
            parent, at = begin.parent, begin.parent.index(begin)
            if word != "begins" or not isinstance(parent[at + 2], nodes.table):
                continue
            end = next(i for i in range(at, len(parent)) if parent[i].astext() == f"{name} ends")
            rows = len(list(parent[at + 2].findall(nodes.row))) - 1
            opening = f'<details class="behind"><summary>Table of {rows} rows, and its commands</summary>'
            parent.insert(end, nodes.raw("", "</details>", format="html"))
            parent.insert(at + 2, nodes.raw("", opening, format="html"))


def setup(app: Sphinx) -> dict[str, Any]:
    app.add_config_value("tables_behind", [], "env", [list])
    app.add_transform(TablesBehind)
    return {"parallel_read_safe": True, "parallel_write_safe": True}

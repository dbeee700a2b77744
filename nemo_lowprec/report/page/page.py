"""Makes one HTML file of a template, charts and their numbers, with style, code and the chart library inside."""

from __future__ import annotations

import base64
import gzip
import json
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from nemo_lowprec.checkpoint.writing import file_in_place
from nemo_lowprec.extras import needs_extras
from nemo_lowprec.report.page import words


def page(template: str, contents: dict[str, Any], **said: Any) -> str:
    """The HTML of a page.

    Args:
        template: name of a file beside this one.
        contents: ``charts``, by name; ``layers`` and ``params``, heatmaps.
        said: what the template shows.

    Raises:
        MissingPackageError: a package that pages need is not installed.
    """
    environment, library = _library()
    folder = files("nemo_lowprec.report.page")
    # In plain JSON the numbers of many layers are most of the file.
    packed = base64.b64encode(gzip.compress(json.dumps(contents, separators=(",", ":")).encode(), 9, mtime=0))
    parts = {name: (folder / f"page.{name}").read_text() for name in ("css", "js")}
    found: str = environment.get_template(template).render(
        library=library, packed=packed.decode(), style=parts["css"], code=parts["js"], words=words, **said
    )
    return found


def write_page(path: Path, html: str) -> None:
    """Write a page, complete or not at all."""
    with file_in_place(path) as file:
        file.write(html.encode())


def check_packages() -> None:
    """Raise MissingPackageError where a package that pages need is not installed."""
    _library()


@cache
def _library() -> tuple[Any, str]:
    """The environment of the templates, and the code of Vega-Embed, Vega-Lite and Vega."""
    with needs_extras("A page"):
        import vl_convert
        from jinja2 import Environment, PackageLoader, StrictUndefined
    loader = PackageLoader("nemo_lowprec.report", "page")
    environment = Environment(
        loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined
    )
    return environment, vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;").replace("</script", "<\\/script")

"""The list of families in ``docs/models.rst``; ``python -m tests.families_page`` writes it anew."""

from __future__ import annotations

import re
import textwrap
from collections import defaultdict
from pathlib import Path

import torch

from nemo_lowprec.chart.groups import LayerFilter
from nemo_lowprec.chart.recipe import Recipe
from nemo_lowprec.compute import ReferenceBackend, convert_layers
from nemo_lowprec.compute.coverage import groups_of
from nemo_lowprec.compute.filters import HEAD
from nemo_lowprec.compute.operands import new_histories
from tests.families import FAMILIES

PAGE = Path(__file__).parents[1] / "docs" / "models.rst"
_PLACE = re.compile(r"(?<=\.\. families begins\n\n).*?(?=\n\.\. families ends)", re.DOTALL)


def converted(family: str) -> tuple[str, str]:
    """(names of the layers in FP8, names and reasons of matrices that GEMMs read in half precision) of a family."""
    model, recipe = FAMILIES[family][0](), Recipe("delayed")
    result = convert_layers(
        model, torch.bfloat16, recipe, ReferenceBackend(), None, LayerFilter(), new_histories(recipe)
    )
    left: dict[str, dict[str, None]] = defaultdict(dict)
    for group in groups_of(model, result):
        if group.fate.kind == "half" and group.elements and group.fate.reason != HEAD:
            left[group.fate.reason] |= dict.fromkeys(map(_short, group.names))
    others = "; ".join(f"{', '.join(names)} ({reason})" for reason, names in left.items())
    return ", ".join(dict.fromkeys(map(_short, result.low))) or "nothing", others


def _short(name: str) -> str:
    """The last part of a layer's name, with the part before where the last one alone says nothing."""
    parts = [part for part in name.split(".") if not part.isdigit()]
    own = parts[-2:] if parts[-1] in ("dense", "weight", "projection", "original0", "original1") else parts[-1:]
    return "``" + ".".join(own) + "``"


def listing() -> str:
    """Families that are converted alike, as a definition list."""
    alike: dict[tuple[str, str], list[str]] = defaultdict(list)
    for family in FAMILIES:
        alike[converted(family)].append(family)
    entries = []
    for (low, left), families in alike.items():
        text = f"FP8: {low}." + (f" Half precision: {left}." if left else "")
        entries.append("\n".join([", ".join(families), *_wrapped(text)]))
    return "\n\n".join(entries) + "\n"


def _wrapped(text: str) -> list[str]:
    indent = " " * 3
    return textwrap.wrap(text, 118, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False)


def written(page: str) -> str:
    """The page with the list in its place."""
    return _PLACE.sub(lambda _: listing(), page)


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text()))

"""The groups of the configuration and their choices, in the package's folder and in the user's folders."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from nemo_lowprec.chart import CHART

__all__ = ["CONF_DIR", "GROUPS", "arguments_of", "choices_of", "file_of"]

CONF_DIR = Path(__file__).parent
GROUPS = ("precision", *sorted(p.name for p in CONF_DIR.iterdir() if p.is_dir() and not p.name.startswith("_")))


def choices_of(group: str, folders: Sequence[Path] = ()) -> list[str]:
    """Names of a group's choices: the levels for ``precision``, and the files in the package's and in more folders."""
    names = list(CHART) if group == "precision" else []
    for folder in (CONF_DIR, *folders):
        names += sorted(str(f.relative_to(folder / group).with_suffix("")) for f in (folder / group).rglob("*.yaml"))
    return list(dict.fromkeys(names))


def arguments_of(group: str) -> set[str]:
    """Names of the arguments in the package's files of a group, such as ``model``."""
    import yaml

    names: set[str] = set()
    for file in (CONF_DIR / group).glob("*.yaml"):
        names |= {name for name in yaml.safe_load(file.read_text()) if not name.startswith("_")}
    return names


def file_of(group: str, choice: str, folders: Sequence[Path] = ()) -> Path | None:
    """The file of a choice, first in the package's folder, then in more folders; None for a level of the chart."""
    files = [folder / group / f"{choice}.yaml" for folder in (CONF_DIR, *folders)]
    return next((file for file in files if file.is_file()), None)

"""The groups of the configuration and their choices, in the package's folder and in the user's folders."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nemo_lowprec.chart import ALIASES, CHART, get_level, preset_of
from nemo_lowprec.chart.options import option_defaults

CONF_DIR = Path(__file__).parent
GROUPS = ("precision", *sorted(p.name for p in CONF_DIR.iterdir() if p.is_dir() and not p.name.startswith("_")))


def choices_of(group: str, folders: Sequence[Path] = ()) -> list[str]:
    """Names of a group's choices: the levels and aliases for ``precision``, and the files in the package's folder and
    in more folders.
    """
    names = [*CHART, *ALIASES] if group == "precision" else []
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


def register_levels() -> None:
    """Puts every level into Hydra's ConfigStore: its function as ``_target_``, its arguments with their defaults.

    An alias is its level with other defaults.
    """
    from hydra.core.config_store import ConfigStore  # nemo-lowprec run reads the choices without Hydra

    store = ConfigStore.instance()
    for name in (*CHART, *ALIASES):
        level = get_level(name)
        node: dict[str, Any] = {"_target_": f"nemo_lowprec.{level.name}", "_convert_": "all"}
        for argument, value in (option_defaults(level) | preset_of(name)).items():
            node[argument] = list(value) if isinstance(value, tuple) else value
        store.store(group="precision", name=name, node=node, provider="nemo_lowprec.chart")

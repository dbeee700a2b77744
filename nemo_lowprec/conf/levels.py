"""The Hydra group ``precision``: one node a level, made from the arguments that the level takes."""

from __future__ import annotations

from typing import Any

from hydra.core.config_store import ConfigStore

from nemo_lowprec.chart import CHART, get_level
from nemo_lowprec.options import option_defaults

__all__ = ["level_node", "register_levels"]


def level_node(name: str) -> dict[str, Any]:
    """The config of a level: its function as ``_target_``, and its arguments with their defaults."""
    node: dict[str, Any] = {"_target_": f"nemo_lowprec.{name}", "_convert_": "all"}
    for argument, value in option_defaults(get_level(name)).items():
        node[argument] = list(value) if isinstance(value, tuple) else value
    return node


def register_levels() -> None:
    """Puts every level that can be trained with into Hydra's ConfigStore."""
    store = ConfigStore.instance()
    for name in CHART:
        store.store(group="precision", name=name, node=level_node(name), provider="nemo_lowprec.chart")

"""The Hydra group ``precision``: one node for each level, made from the arguments of the level."""

from __future__ import annotations

from typing import Any

from hydra.core.config_store import ConfigStore

from nemo_lowprec.chart import CHART
from nemo_lowprec.options import option_defaults

__all__ = ["register_levels"]


def register_levels() -> None:
    """Puts every level into Hydra's ConfigStore: its function as ``_target_``, its arguments with their defaults."""
    store = ConfigStore.instance()
    for name, level in CHART.items():
        node: dict[str, Any] = {"_target_": f"nemo_lowprec.{name}", "_convert_": "all"}
        for argument, value in option_defaults(level).items():
            node[argument] = list(value) if isinstance(value, tuple) else value
        store.store(group="precision", name=name, node=node, provider="nemo_lowprec.chart")

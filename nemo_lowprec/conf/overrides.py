"""Checks overrides before Hydra composes them, and explains overrides that Hydra cannot merge.

This file does not import torch, so that a typo is answered at once.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.conf import HydraConf
from hydra.core.override_parser.types import Override, OverrideType
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from nemo_lowprec.chart import get_level
from nemo_lowprec.chart.options import parse_options
from nemo_lowprec.conf.choices import CONF_DIR, GROUPS, choices_of, file_of
from nemo_lowprec.conf.command_line import CommandLine, one_sentence
from nemo_lowprec.lines import nearest

_STRATEGY = "trainer.strategy"
_PROCESSES = ("nodes", "gpus", "trainer.num_nodes", "trainer.devices")


def check_overrides(line: CommandLine) -> None:
    """Check the syntax of overrides, Hydra's own settings, and the choices of the groups.

    Raises:
        ValueError: a malformed override, an unknown choice of a group, or a folder that does not exist.
        TypeError: an unknown setting of Hydra's.
    """
    for folder in line.folders or ():
        if not folder.is_dir():
            raise ValueError(f"{folder} is no folder: --config-dir and hydra.searchpath take folders of YAML files.")
    for override in line.parsed:
        group, _, setting = override.key_or_group.partition(".")
        if group == "hydra" and setting.partition(".")[0] not in HydraConf.__dataclass_fields__:
            raise TypeError(f"hydra.{setting} is no setting of Hydra's.")
        if line.folders is None or override.key_or_group not in GROUPS or override.type is OverrideType.DEL:
            continue
        known = choices_of(group, line.folders)
        for choice in _choices(override):
            if choice in known:
                continue
            if group == "precision" and not line.folders:
                get_level(choice)  # raises the chart's own ValueError
            raise ValueError(f"Unknown {group} {choice!r}. Choose one of: {', '.join(known)}.")


def with_plus(line: CommandLine) -> CommandLine:
    """The command line with ``++`` before the overrides that a user may write with or without ``+``.

    Hydra requires a ``+`` for a key that no file has, such as a field of a model's architecture. Hydra refuses a ``+``
    for a key of a file, such as an option of the Trainer.
    """
    pattern = r"^(?:\+?(?=model\.(?:config|transformer)\.)|\+(?=trainer\.))"
    return replace(line, overrides=tuple(re.sub(pattern, "++", o) for o in line.overrides))


def with_strategy(line: CommandLine) -> CommandLine:
    """The command line with a strategy for several processes where the user chose none, for ``plan``.

    Options of the added strategy, such as ``trainer.strategy.shard_size=8``, can then be overridden.
    """
    given = {override.key_or_group: override.value() for override in line.parsed}
    chosen: dict[str, str] = {}
    file = file_of("experiment", str(given.get("experiment")), line.folders or ())
    defaults: Any = [] if file is None else OmegaConf.select(OmegaConf.load(file), "defaults", default=[])
    for entry in defaults:
        if isinstance(entry, DictConfig):
            chosen |= {str(key).rpartition("/")[2]: str(value) for key, value in entry.items()}
    chosen |= {group: str(given[group]) for group in ("model", "strategy") if group in given}
    on_megatron = chosen.get("model", "").startswith("megatron_")
    counts = [given.get(name) for name in _PROCESSES]
    several = any(isinstance(count, int) and count > 1 for count in counts)
    if "strategy" in chosen or not (on_megatron or several):
        return line
    strategy = "lowprec_megatron" if on_megatron else "lowprec_sharded"
    return replace(line, overrides=(f"strategy={strategy}", *line.overrides))


def explain(error: Exception, line: CommandLine) -> Exception:
    """The exception to raise for an override that Hydra cannot merge, with one sentence about the mistake."""
    found = re.search(r"Could not override '([^']+)'", str(error))
    if found is None or line.folders is None:
        return ValueError(one_sentence(error))
    key = found[1]
    groups = [o.input_line for o in line.parsed if o.key_or_group in GROUPS and o.input_line]
    search = f"hydra.searchpath=[{', '.join(f'file://{folder.absolute()}' for folder in line.folders)}]"
    try:
        with initialize_config_dir(str(CONF_DIR), version_base="1.3"):
            cfg = compose("config", overrides=[search, *groups])
    except (HydraException, OmegaConfBaseException):  # a sweep over a group, say
        return ValueError(one_sentence(error))
    if key.startswith("precision."):
        level = str(cfg.precision.get("_target_")).removeprefix("nemo_lowprec.")
        try:
            parse_options(get_level(level), {key.partition(".")[2]: None})
        except (TypeError, ValueError) as refused:
            return refused
    *above, name = key.split(".")
    if above == ["monitor"] and not cfg.get("monitor"):
        return ValueError(f"{key} is an argument of the monitor, which is off: add monitor=on.")
    node: Any = OmegaConf.to_container(cfg, resolve=False)
    for i, part in enumerate(above):
        inner = node.get(part)
        if inner is not None and not isinstance(inner, dict):
            path = ".".join(above[: i + 1])
            way = " Choose strategy=lowprec_sharded, lowprec_ddp or lowprec_megatron." if path == _STRATEGY else ""
            return TypeError(f"There is no setting {key!r}: {path} is {inner!r}.{way}")
        if inner is None:
            return ValueError(one_sentence(error))
        node = inner
    return TypeError(f"There is no setting {key!r}.{nearest(name, [str(k) for k in node])}")


def _choices(override: Override) -> list[str]:
    if override.is_sweep_override():
        return list(override.sweep_string_iterator())
    value = override.value()
    return [] if value is None else [str(v) for v in value] if isinstance(value, list) else [str(value)]

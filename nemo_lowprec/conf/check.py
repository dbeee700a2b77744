"""Checks a composed Hydra config before any object is made: every group against the arguments of its ``_target_``.

``check_values`` needs neither torch nor Lightning and comes first, so that most mistakes are answered at once.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from hydra.utils import get_object
from omegaconf import DictConfig, OmegaConf

from nemo_lowprec.arguments import RANGES, Seed, Text, check_arguments, check_value
from nemo_lowprec.chart import CHART, get_level
from nemo_lowprec.chart.options import parse_options
from nemo_lowprec.lines import nearest

_VALUES: dict[str, Any] = {
    "seed": Seed,
    "ckpt_path": Text | None,
    "nodes": int | None,
    "gpus": int | str | list[int] | None,
    "output_dir": Text,
}
_GROUPS = ("precision", "model", "data", "trainer", "checkpoint")
_MONITOR = "monitor"  # a group that may be empty, or missing in a config of the user's own
_OF_HYDRA = {"_target_", "_convert_", "_recursive_"}
# Trainer arguments that the job sets itself, and the place of the user's choice.
_TAKEN = {
    "plugins": "the precision group and its arguments",
    "callbacks": "the group checkpoint; a script of your own takes more callbacks",
    "model_registry": "the checkpoints; a script of your own may send them to a registry",
}
_LOGGED = ("val/loss", "val/perplexity", "train/loss", "train/perplexity", "lr")


def check_values(cfg: DictConfig, complete: bool = True) -> dict[str, Any]:
    """Check settings, arguments of the level, and ranges of values by their names, without torch or Lightning.

    Args:
        cfg, complete: as for ``check_config``.

    Returns:
        The config as plain dicts and lists.

    Raises:
        TypeError: an unknown setting or argument.
        ValueError: a bad value, or a missing setting.
        omegaconf.errors.OmegaConfBaseException: an interpolation that cannot be resolved.
    """
    whole = OmegaConf.to_container(cfg, resolve=True)
    assert isinstance(whole, dict)
    known = [*_VALUES, *_GROUPS, _MONITOR]
    for name in whole:
        if name not in known:
            raise TypeError(f"There is no setting {name!r}.{nearest(str(name), known)}")
    for name, kind in _VALUES.items():
        if name not in whole:
            raise ValueError(f"{name} is missing: leave it in.")
        check_value(name, whole[name], kind)
    whole.setdefault(_MONITOR, {})
    for name in (*_GROUPS, _MONITOR):
        if not isinstance(whole.get(name), dict):
            raise ValueError(f"{name}={whole.get(name)!r} must be a choice of the group {name}.")
    for name, instead in _TAKEN.items():
        if name in whole["trainer"]:
            raise TypeError(f"trainer.{name} is not read: use {instead}.")
    level = str(whole["precision"]["_target_"]).removeprefix("nemo_lowprec.")
    if level in CHART:
        parse_options(get_level(level), _arguments_of(whole["precision"]))
    nodes = {path: whole[path] for path in ("model", "data", "trainer", "checkpoint", _MONITOR)}
    nodes["trainer.strategy"] = whole["trainer"].get("strategy")
    for path, node in nodes.items():
        for name, value in node.items() if isinstance(node, dict) else ():
            if value == "???" and complete:
                raise _missing(f"{path}.{name}")
            if value not in ("???", None) and name in RANGES:  # only the class knows where None is allowed
                check_value(f"{path}.{name}", value, RANGES[name])
    return whole  # type: ignore[return-value]


def check_config(cfg: DictConfig, complete: bool = True) -> None:
    """Check a whole config without making an object.

    Args:
        cfg: the composed config; interpolations are resolved.
        complete: whether the run starts on this machine. Then mandatory keys (``data.source`` of ``data=text``) must be
            set, and the machine must be able to run the processes.

    Raises:
        TypeError: a key that nothing reads.
        ValueError: a bad value, or a missing key.
        omegaconf.errors.OmegaConfBaseException: an interpolation that cannot be resolved.
    """
    from nemo_lowprec.checks import check_processes
    from nemo_lowprec.train import check_ckpt_path

    whole = check_values(cfg, complete)
    trainer = whole["trainer"]
    for name in (*_GROUPS, *([_MONITOR] if whole[_MONITOR] else [])):
        if not complete:
            whole[name] = {key: value for key, value in whole[name].items() if value != "???"}
        _check_node(name, whole[name], complete)
    if str(whole["model"]["_target_"]).startswith("nemo_lowprec."):
        _check_model(whole["model"])
        monitor = whole["checkpoint"].get("monitor")
        if monitor is not None and monitor not in _LOGGED:
            raise ValueError(f"checkpoint.monitor={monitor!r} must be one of: {', '.join(_LOGGED)}, or null.")
    if complete:
        devices = ("trainer.devices", trainer.get("devices")) if whole["gpus"] is None else ("gpus", whole["gpus"])
        nodes = ("trainer.num_nodes", trainer.get("num_nodes")) if whole["nodes"] is None else ("nodes", whole["nodes"])
        check_processes(devices[1], nodes[1], trainer.get("accelerator"), (devices[0], nodes[0]))
    check_ckpt_path(whole["ckpt_path"])


def _check_node(path: str, node: Mapping[str, Any], complete: bool = True) -> None:
    """Check a mapping with ``_target_``, and the mappings within it, against the signature of the target."""
    from nemo_lowprec.plugins import LEVELS

    target = _located(path, node)
    is_level = target in LEVELS.values()
    given = _arguments_of(node)
    for name in ("_args_", "_partial_"):  # Hydra's keys for positional arguments and for functools.partial
        if name in given:
            raise TypeError(f"{path}.{name} is not read: name the arguments.")
    choices: tuple[Any, ...]
    for name, choices in (("_convert_", ("none", "partial", "object", "all")), ("_recursive_", (True, False))):
        if node.get(name, choices[0]) not in choices:
            raise ValueError(f"{path}.{name}={node[name]!r} must be one of: {', '.join(map(str, choices))}.")
    try:
        parameters = inspect.signature(target).parameters
    except ValueError:  # a class of C, such as timedelta, checks its arguments itself
        return
    takes_more = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    names = [n for n, p in parameters.items() if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
    if getattr(target, "__name__", "") == "TensorBoardLogger":
        takes_more = False  # its further arguments go to a writer that is made after training has begun
    plain = {}
    for name, value in given.items():
        if value == "???":
            raise _missing(f"{path}.{name}")
        if name not in names and not takes_more and not is_level:
            raise TypeError(
                f"{path}.{name}: {target.__name__} got an unexpected keyword argument {name!r}.{nearest(name, names)}"
            )
        below = [value] if isinstance(value, dict) else value if isinstance(value, list) else []
        nodes = [entry for entry in below if isinstance(entry, dict) and "_target_" in entry]
        for i, entry in enumerate(nodes):
            _check_node(f"{path}.{name}" if isinstance(value, dict) else f"{path}.{name}.{i}", entry)
        if not nodes:
            plain[name] = value
    for name in names:
        if complete and parameters[name].default is inspect.Parameter.empty and name not in given:
            raise _missing(f"{path}.{name}")
    if not is_level:
        check_arguments(target, plain, f"{path}.")


def _located(path: str, node: Mapping[str, Any]) -> Callable[..., Any]:
    name = node.get("_target_")
    if not isinstance(name, str) or not name:
        raise ValueError(f"{path}._target_={name!r} must be the dotted name of a class or a function.")
    try:
        found = get_object(name)
    except Exception as error:
        raise ValueError(f"{path}._target_={name!r} cannot be imported: {str(error).splitlines()[0]}") from error
    if not callable(found):
        raise ValueError(f"{path}._target_={name!r} is no class or function.")
    return found  # type: ignore[no-any-return]


def _arguments_of(node: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in node.items() if name not in _OF_HYDRA}


def _missing(path: str) -> ValueError:
    return ValueError(f"{path} is missing: add {path}=...")


def _check_model(node: Mapping[str, Any]) -> None:
    from nemo_lowprec.models.architecture import check_architecture
    from nemo_lowprec.models.presets import get_preset

    config = node.get("config") or {}
    if node.get("preset") is not None:
        preset = get_preset(node["preset"])
        if config:
            check_architecture(preset.model_type, {**preset.config, **config}, "model.config.")

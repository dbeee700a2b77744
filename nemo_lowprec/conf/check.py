"""Checks a composed Hydra config before anything of it is made: every group against what its ``_target_`` takes.

``check_values`` needs neither torch nor Lightning, and is made first: most mistakes are answered at once.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from hydra.utils import get_object
from omegaconf import DictConfig, OmegaConf

from nemo_lowprec.arguments import RANGES, Seed, Text, check_arguments, check_value
from nemo_lowprec.chart import CHART, get_level
from nemo_lowprec.nearest import nearest
from nemo_lowprec.options import parse_options

__all__ = ["check_config", "check_values"]

_VALUES: dict[str, Any] = {
    "seed": Seed,
    "ckpt_path": Text | None,
    "nodes": int | None,
    "gpus": int | str | list[int] | None,
    "output_dir": Text,
}
_GROUPS = ("precision", "model", "data", "trainer", "checkpoint")
_OF_HYDRA = {"_target_", "_convert_", "_recursive_"}
# What the job gives to the Trainer itself.
_TAKEN = {
    "plugins": "the precision group and its arguments",
    "callbacks": "the group checkpoint; a script of your own takes more callbacks",
    "model_registry": "the checkpoints; a script of your own may send them to a registry",
}
_LOGGED = ("val/loss", "val/perplexity", "train/loss", "train/perplexity", "lr")


def check_values(cfg: DictConfig, complete: bool = True) -> dict[str, Any]:
    """Check what needs no other library: settings, arguments of the level, and ranges of values by their names.

    Args:
        cfg, complete: as for ``check_config``.

    Returns:
        The config as plain dicts and lists.

    Raises:
        TypeError: a setting or an argument that there is not.
        ValueError: a bad value, or a setting that is missing.
        omegaconf.errors.OmegaConfBaseException: an interpolation that cannot be resolved.
    """
    whole = OmegaConf.to_container(cfg, resolve=True)
    assert isinstance(whole, dict)
    for name in whole:
        if name not in {*_VALUES, *_GROUPS}:
            raise TypeError(f"There is no setting {name!r}.{nearest(str(name), [*_VALUES, *_GROUPS])}")
    for name, kind in _VALUES.items():
        if name not in whole:
            raise ValueError(f"{name} is missing: leave it in.")
        check_value(name, whole[name], kind)
    for name in _GROUPS:
        if not isinstance(whole.get(name), dict):
            raise ValueError(f"{name}={whole.get(name)!r} must be a choice of the group {name}.")
    for name, instead in _TAKEN.items():
        if name in whole["trainer"]:
            raise TypeError(f"trainer.{name} is not read: use {instead}.")
    _check_precision(whole["precision"])
    for path in ("model", "data", "trainer", "trainer.strategy", "checkpoint"):
        node = whole[path] if path in whole else whole["trainer"].get("strategy")
        for name, value in node.items() if isinstance(node, dict) else ():
            if value == "???":
                if complete:
                    raise ValueError(f"{path}.{name} is missing: add {path}.{name}=...")
            elif name in RANGES and value is not None:  # what may be None is known to the class only
                check_value(f"{path}.{name}", value, RANGES[name])
    return whole  # type: ignore[return-value]


def check_config(cfg: DictConfig, complete: bool = True) -> None:
    """Check everything that can be seen without making an object.

    Args:
        cfg: the composed config; interpolations are resolved.
        complete: whether the run is to start here: what a choice leaves to be said (``data.source`` of ``data=text``)
            must be there, and the machine must have a use for so many processes.

    Raises:
        TypeError: a key that nobody reads.
        ValueError: a bad value, or a key that is missing.
        omegaconf.errors.OmegaConfBaseException: an interpolation that cannot be resolved.
    """
    from nemo_lowprec.checks import check_processes
    from nemo_lowprec.train import check_ckpt_path

    whole = check_values(cfg, complete)
    trainer = whole["trainer"]
    for name in _GROUPS:
        if not complete:
            whole[name] = {key: value for key, value in whole[name].items() if value != "???"}
        _check_node(name, whole[name], complete)
    _check_model(whole["model"])
    monitor = whole["checkpoint"].get("monitor")
    if monitor is not None and monitor not in _LOGGED and _is_ours(whole["model"]):
        raise ValueError(f"checkpoint.monitor={monitor!r} must be one of: {', '.join(_LOGGED)}, or null.")
    devices = "trainer.devices" if whole["gpus"] is None else "gpus"
    nodes = "trainer.num_nodes" if whole["nodes"] is None else "nodes"
    if complete:  # else nothing is started here
        count, machines = (trainer.get(n[8:]) if n.startswith("trainer.") else whole[n] for n in (devices, nodes))
        check_processes(count, machines, trainer.get("accelerator"), (devices, nodes))
    check_ckpt_path(whole["ckpt_path"])


def _check_node(path: str, node: Mapping[str, Any], complete: bool = True) -> None:
    """Check a mapping with ``_target_``, and those within it, against the signature of what it names."""
    target = _located(path, node)
    given = {name: value for name, value in node.items() if name not in _OF_HYDRA}
    # Hydra's own way to hand over positional arguments, or to make a function of the object.
    for name in ("_args_", "_partial_"):
        if name in given:
            raise TypeError(f"{path}.{name} is not read: name the arguments.")
    for name in ("_convert_", "_recursive_"):
        choices = {"_convert_": ("none", "partial", "object", "all"), "_recursive_": (True, False)}[name]
        if node.get(name, choices[0]) not in choices:
            raise ValueError(f"{path}.{name}={node[name]!r} must be one of: {', '.join(map(str, choices))}.")
    try:
        parameters = inspect.signature(target).parameters
    except ValueError:  # of a class of C, such as timedelta: it checks them itself
        return
    takes_more = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    names = [n for n, p in parameters.items() if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
    if getattr(target, "__name__", "") == "TensorBoardLogger":
        takes_more = False  # what it gathers it hands to a writer, when training has begun
    plain = {}
    for name, value in given.items():
        if value == "???":
            raise ValueError(f"{path}.{name} is missing: add {path}.{name}=...")
        if name not in names and not takes_more and target not in _levels():
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
            raise ValueError(f"{path}.{name} is missing: add {path}.{name}=...")
    if target not in _levels():
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


def _levels() -> tuple[Any, ...]:
    from nemo_lowprec.plugins import LEVELS

    return tuple(LEVELS.values())


def _check_precision(node: Mapping[str, Any]) -> None:
    name = str(node["_target_"]).removeprefix("nemo_lowprec.")
    if name in CHART:
        parse_options(get_level(name), {n: v for n, v in node.items() if n not in _OF_HYDRA})


def _is_ours(node: Mapping[str, Any]) -> bool:
    return str(node["_target_"]).startswith("nemo_lowprec.")


def _check_model(node: Mapping[str, Any]) -> None:
    if not _is_ours(node):
        return
    from nemo_lowprec.models.architecture import check_architecture
    from nemo_lowprec.models.presets import get_preset

    config = node.get("config") or {}
    if node.get("preset") is not None:
        preset = get_preset(node["preset"])
        if config:
            check_architecture(preset.model_type, {**preset.config, **config}, "model.config.")

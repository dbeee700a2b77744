"""Checks the names in a command line's settings against the recipe, before nemo_run sets the values."""

from __future__ import annotations

import copy
import inspect
import logging
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import catalogue
import fiddle as fdl
from lightning.pytorch import LightningModule
from lightning.pytorch.strategies import Strategy, StrategyRegistry
from nemo_run.cli.cli_parser import CLIException, parse_cli_args
from nemo_run.config import get_type_namespace

from nemo_lowprec.chart import CHART, get_level
from nemo_lowprec.chart.options import check_option
from nemo_lowprec.lines import nearest
from nemo_lowprec.report.monitor import PrecisionMonitor
from nemo_lowprec.run_arguments import check_level, split_call, split_setting

_KINDS: dict[str, type] = {"model": LightningModule, "trainer.strategy": Strategy, "monitor": PrecisionMonitor}


def check_names(recipe: fdl.Buildable, settings: Sequence[str]) -> None:
    """Check that the recipe has every argument that a setting names.

    Args:
        recipe: is not changed.
        settings: words of the command line, such as ``trainer.max_steps=20``.

    Raises:
        TypeError: an argument that its class or function does not take, or an argument of a plain value.
        ValueError: an unknown level, model or strategy, a value of another type, or a word that is no setting.
    """
    recipe = copy.deepcopy(recipe)
    pairs = {setting: split_setting(setting) for setting in settings}
    # nemo_run's order: a whole part of the recipe comes before the part's arguments.
    for setting, (path, value) in sorted(pairs.items(), key=lambda pair: "." in pair[1][0]):
        _check_path(recipe, path)
        if path == "trainer.plugins":
            check_level(value)
        _check_factory(path, value)
        try:
            with nemo_run_words():
                parse_cli_args(recipe, [setting])
        except ValueError as error:
            if "${" in value:  # nemo_run resolves an interpolation first
                return
            raise ValueError(f"{setting}: {error}") from error


@contextmanager
def nemo_run_words() -> Iterator[None]:
    """Shorten nemo_run's exceptions to a ValueError with the first cause, without the text of the whole recipe."""
    # nemo_run also logs the recipe before an exception.
    log = logging.getLogger("nemo_run.cli.cli_parser")
    was_disabled, log.disabled = log.disabled, True
    try:
        yield
    except (CLIException, ValueError) as error:
        first: BaseException = error
        while first.__cause__ is not None:
            first = first.__cause__
        text = re.split(r" for <| \(Argument:", (str(first).splitlines() or [type(first).__name__])[0])[0]
        raise ValueError(re.sub(r"<class '([\w.]+)'>", r"\1", text).rstrip(".") + ".") from error
    finally:
        log.disabled = was_disabled


def _check_path(recipe: fdl.Buildable, path: str) -> None:
    node: Any = recipe
    *above, last = path.split(".")
    for i, part in enumerate(above):
        name, *indices = re.findall(r"\w+", part)
        _check_name(node, name, path)
        node = getattr(node, name, None)
        for index in indices:
            try:
                node = node[int(index)]
            except (IndexError, TypeError, ValueError):
                raise ValueError(f"There is no setting {path!r}: no [{index}] is in {name}.") from None
        if not isinstance(node, fdl.Buildable | dict):
            here = ".".join(above[: i + 1])
            factory = {"trainer.strategy": "lowprec_sharded", "monitor": "precision_monitor"}.get(here)
            way = f" Put {here}={factory} before it." if factory else ""
            raise TypeError(f"There is no setting {path!r}: {here} is {node!r}.{way}")
    _check_name(node, re.split(r"\[", last)[0], path)


def _check_name(node: Any, name: str, path: str) -> None:
    if not isinstance(node, fdl.Buildable):
        return
    function = fdl.get_callable(node)
    level = getattr(function, "__name__", None)
    if level in CHART:
        check_option(get_level(level), name)
    known = _arguments(function)
    if known is not None and name not in known:
        raise TypeError(f"There is no setting {path!r}.{nearest(name, known)}")


def _arguments(function: Callable[..., Any]) -> list[str] | None:
    """Names of a function's arguments; None where the function takes any.

    A class of this package passes further arguments to its base class of Lightning.
    """
    names: dict[str, None] = {}
    for cls in (
        [c for c in inspect.getmro(function) if "__init__" in vars(c)] if inspect.isclass(function) else [function]
    ):
        parameters = inspect.signature(cls).parameters
        names |= dict.fromkeys(n for n, p in parameters.items() if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL))
        if not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
            return list(names)
        if not cls.__module__.startswith("nemo_lowprec."):
            return None if cls is function else list(names)
    return None


def _check_factory(path: str, value: str) -> None:
    """Check the name of a factory of ``_KINDS``, and the arguments in brackets after the name."""
    call = split_call(value)
    if path not in _KINDS or call is None or "." in call[0] or call[0].isdecimal():
        return
    name, arguments = call
    kind = get_type_namespace(_KINDS[path])
    factories = {keys[-1]: factory for keys, factory in catalogue.REGISTRY.items() if keys[0] == kind}
    strategies = ["auto", *StrategyRegistry.available_strategies()]
    words = {"trainer.strategy": strategies, "monitor": ["True", "False"]}.get(path, [])
    if name not in factories:
        if arguments or name not in words:
            word = path.rpartition(".")[2]
            raise ValueError(f"Unknown {word} {name!r}.{nearest(name, dict.fromkeys([*factories, *words]))}")
        return
    known = _arguments(factories[name]) or []
    for argument in arguments:
        if argument not in known:
            raise TypeError(f"{name} has no argument {argument!r}.{nearest(argument, known)}")

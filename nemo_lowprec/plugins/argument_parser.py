"""A parser for LightningCLI that names a level's wrong argument in one sentence, and has a help page for each level.

``LightningCLI(Model, Data, parser_class=LevelArgumentParser)``. LightningCLI's own parser takes levels by their
class_path all the same; its messages hold a line for every kind of plugin, and it has help pages for classes only.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterator, Sequence
from importlib import import_module
from typing import Any, NoReturn

from jsonargparse import Namespace
from lightning.pytorch.cli import LightningArgumentParser
from typing_extensions import override

from nemo_lowprec.arguments import check_arguments
from nemo_lowprec.chart import ALIASES, CHART, get_level, preset_of
from nemo_lowprec.chart.options import check_option, parse_options
from nemo_lowprec.lines import nearest
from nemo_lowprec.plugins.levels import ALIASED, LEVELS

_PACKAGE = "nemo_lowprec."
_PLUGINS = "trainer.plugins"
_HELP = f"--{_PLUGINS}.help"


class LevelArgumentParser(LightningArgumentParser):
    """``lightning.pytorch.cli.LightningArgumentParser`` for scripts that train at a level.

    ``--trainer.plugins.help=nemo_lowprec.msamp_o2`` lists the level's arguments. A value that a level does not take
    ends the program before any object is made.
    """

    @override
    def parse_args(self, args: Sequence[str] | None = None, *rest: Any, **options: Any) -> Namespace:  # type: ignore[override]
        self._help(list(sys.argv[1:] if args is None else args))
        return self._checked(super().parse_args(args, *rest, **options))

    @override
    def parse_object(self, *args: Any, **options: Any) -> Namespace:
        return self._checked(super().parse_object(*args, **options))

    @override
    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        sentence = _sentence(message)
        if sentence is None or not self.exit_on_error:  # a parser within this one
            super().error(message, ex)
        self.exit(2, f"error: {sentence}\n")

    def _help(self, words: list[str]) -> None:
        """Print the page of the level that ``words`` ask for, and exit."""
        for i, word in enumerate(words):
            option, _, value = word.partition("=")
            name = (value or "".join(words[i + 1 : i + 2])).removeprefix(_PACKAGE)
            if option == _HELP and name in (*LEVELS, *ALIASED):
                page = LightningArgumentParser(add_help=False, usage=f"--{_PLUGINS}={_PACKAGE}{name} [options]")
                page.add_function_arguments((LEVELS | ALIASED)[name], _PLUGINS)
                page.print_help()
                self.exit()

    def _checked(self, config: Namespace) -> Namespace:
        for node in _nodes(config):
            arguments = dict(vars(node.get("init_args", Namespace()))) | dict(node.get("dict_kwargs") or {})
            name = str(node["class_path"]).removeprefix(_PACKAGE)
            level = arguments.pop("level", None) if name == "LowPrecision" else name
            if name == "LowPrecision" or level in CHART or level in ALIASES:
                try:
                    parse_options(get_level(level), preset_of(level) | arguments)  # type: ignore[arg-type]
                except (TypeError, ValueError) as error:
                    self.exit(2, f"error: {error}\n")
        return config


def _nodes(value: Any) -> Iterator[Namespace]:
    """The parts of a config that have a class_path."""
    if isinstance(value, Namespace):
        if value.get("class_path"):
            yield value
        value = list(vars(value).values())
    for part in value if isinstance(value, list) else ():
        yield from _nodes(part)


def _sentence(message: str) -> str | None:
    """One sentence about an argument of a class or a level of this package; None about anything else."""
    for bare in re.findall(r"Expected a dot import path string: (\w+)", message):
        if bare in CHART or bare in ALIASES:
            return f"{bare} is no import path. Write {_PACKAGE}{bare}."
    found = re.search(rf"Problem with given class_path '({_PACKAGE}[\w.]+)':\s+(.*)((?:\n.*)*)", message)
    if found is None:
        return None
    path, problem, below = found.groups()
    name = path.removeprefix(_PACKAGE)
    unknown = re.search(r"Option '(\w+)' is not accepted", problem)
    if unknown is not None:
        return _unknown(name, path, unknown[1])
    key = re.search(r'Parser key "(\w+)', problem)
    value = re.search(r"(?:Got value|Given value): (.*)", below)
    if key is None or value is None:
        return None
    if name in CHART or name in ALIASES:
        try:
            parse_options(get_level(name), {key[1]: value[1]})
            check_arguments((LEVELS | ALIASED)[name], {key[1]: value[1]})
        except (TypeError, ValueError) as error:
            return str(error)
    return f"{path} does not take {key[1]}={value[1]}."


def _unknown(name: str, path: str, argument: str) -> str:
    """The sentence about an argument that a level or a class does not have."""
    if name in CHART or name in ALIASES:
        try:
            check_option(get_level(name), argument)
        except TypeError as error:
            return str(error)
    module, _, of_class = path.rpartition(".")
    known = inspect.signature(getattr(import_module(module), of_class)).parameters
    return f"{of_class} has no argument {argument!r}.{nearest(argument, known)}"

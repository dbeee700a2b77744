"""Lists of choices in the overrides of one command, such as ``precision=msamp_o1,msamp_o2``: one config for each.

This file does not import torch, so that a typo is answered at once.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

from hydra.core.override_parser.types import Override

from nemo_lowprec.arguments import AtLeast1, check_value
from nemo_lowprec.conf.command_line import CommandLine

OWN = {"plan": ("fits",), "advise": ("gpu_memory",), "profile": ("into",)}  # settings of a command that no config has
_COUNTS = ("nodes", "gpus", "trainer.num_nodes", "trainer.devices")


def combinations(line: CommandLine) -> list[CommandLine]:
    """The command line for each combination of the listed choices; the command line itself where none lists any.

    Raises:
        ValueError: a listed number of machines or processes is no number of at least 1.
    """
    choices: list[list[str]] = []
    for override in line.parsed:
        if override.is_sweep_override():
            values = _values(override)
            for value in values if override.key_or_group in _COUNTS else ():
                check_value(override.key_or_group, int(value) if value.isdecimal() else value, AtLeast1)
            choices.append([f"{override.get_key_element()}={value}" for value in values])
        else:
            choices.append([override.input_line or ""])
    return [replace(line, overrides=chosen) for chosen in product(*choices)]


def described(line: CommandLine, whole: CommandLine) -> tuple[str, tuple[str, ...], str]:
    """Name one of the ``combinations`` of ``whole`` by the choices that differ.

    Returns:
        The level, empty where the command line names none; overrides that a table has no column for; machines,
        processes and strategy as the command line gives them.
    """
    level, others, where = "", [], []
    for override, of_whole in zip(line.parsed, whole.parsed, strict=True):
        name, text = override.key_or_group, override.input_line or ""
        if name == "precision":
            level = str(override.value())
        elif name in ("strategy", *_COUNTS):
            where.append(text)
        elif of_whole.is_sweep_override():
            others.append(text)
    return level, tuple(others), " ".join(where)


def take_own(line: CommandLine, command: str) -> tuple[dict[str, Any], CommandLine]:
    """The values of the command's ``OWN`` settings, and the command line without them.

    Raises:
        ValueError: a list of values.
    """
    own: dict[str, Any] = {}
    rest = []
    for override in line.parsed:
        if override.key_or_group not in OWN.get(command, ()):
            rest.append(override.input_line or "")
            continue
        if override.is_sweep_override():
            raise ValueError(f"{override.input_line}: {override.key_or_group} takes one value.")
        own[override.key_or_group] = override.value()
    return own, replace(line, overrides=tuple(rest))


def _values(override: Override) -> list[str]:
    return [str(value) for value in override.sweep_string_iterator()]

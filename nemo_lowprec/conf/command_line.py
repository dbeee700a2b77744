"""A command line of Hydra, split into flags and overrides."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException

_MULTIRUN = {"-m", "--multirun"}
_FOLDER = ("-cd", "--config-dir")
_WITH_VALUE = {*_FOLDER, "-p", "--package", "-cp", "--config-path", "-cn", "--config-name", "-c", "--cfg"}


@dataclass(frozen=True)
class CommandLine:
    """The flags and the overrides of a command line; Hydra's argparse accepts no flag between two overrides.

    Attributes:
        flags: flags with their values, without ``-m``.
        overrides: in their order.
        is_multirun: whether the command line has ``-m``.
    """

    flags: tuple[str, ...]
    overrides: tuple[str, ...]
    is_multirun: bool = False

    @classmethod
    def of(cls, arguments: Sequence[str]) -> CommandLine:
        """Split the arguments of a command."""
        flags: list[str] = []
        overrides: list[str] = []
        before = ""
        for argument in arguments:
            is_flag = argument.startswith("-") or before in _WITH_VALUE
            (flags if is_flag else overrides).append(argument)
            before = argument
        kept = tuple(flag for flag in flags if flag not in _MULTIRUN)
        return cls(kept, tuple(overrides), len(kept) < len(flags))

    @property
    def arguments(self) -> list[str]:
        """Flags and overrides as one list, flags first."""
        return [*["--multirun"] * self.is_multirun, *self.flags, *self.overrides]

    @cached_property
    def parsed(self) -> list[Override]:
        """The overrides as Hydra reads them.

        Raises:
            ValueError: a malformed override.
        """
        try:
            return list(OverridesParser.create().parse_overrides(list(self.overrides)))
        except HydraException as error:
            raise ValueError(one_sentence(error)) from error

    @cached_property
    def folders(self) -> list[Path] | None:
        """The folders of ``--config-dir`` and ``hydra.searchpath``; None where an entry is no folder (``pkg://...``)."""
        named = []
        for before, flag in zip(("", *self.flags), self.flags, strict=False):
            name, equals, value = flag.partition("=")
            named += [flag] if before in _FOLDER else [value] if equals and name in _FOLDER else []
        for override in self.parsed:
            if override.key_or_group == "hydra.searchpath":
                found = override.value()
                named += [str(entry) for entry in (found if isinstance(found, list) else [found])]
        named = [name.removeprefix("file://") for name in named]
        return None if any("://" in name for name in named) else [Path(name) for name in named]


def one_sentence(error: BaseException) -> str:
    """Hydra's message on one line, without the hints that name its internals."""
    lines = [line.strip() for line in str(error).splitlines()]
    kept = [line for line in lines if line and not line.startswith(("full_key:", "object_type=", "See https"))]
    if error.__cause__ is not None and str(error.__cause__):
        kept.append(f"({str(error.__cause__).splitlines()[0]})")
    return " ".join(kept)

"""The command line of ``nemo-lowprec compare``: folders of runs, or overrides of the trainings to compare.

This file does not import torch, so that a mistake is answered at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path

from nemo_lowprec.arguments import Seed, check_value
from nemo_lowprec.conf.command_line import CommandLine
from nemo_lowprec.conf.composed import check_composed
from nemo_lowprec.conf.overrides import check_overrides, with_plus

_OWN = ("precision", "seeds", "output_dir")
_TAKEN = {
    "seed": "seeds=3, or seeds=1,2",
    "ckpt_path": "output_dir=FOLDER of an earlier comparison, which goes on",
    "hydra.run.dir": "output_dir=FOLDER",
    "monitor": "monitor.every_n_steps=10; every run is monitored",
}


@dataclass(frozen=True)
class CompareLine:
    """A command line, read.

    Attributes:
        folders: of runs that are there; none where runs are to be trained.
        levels, seeds: of the trainings, each level with each seed.
        output_dir: the folder of the comparison.
        line: flags and overrides of every training.
        out: HTML file to write; None: ``compare.html`` in ``output_dir``, or in the working directory.
        by_nemo_run: whether nemo_run starts the trainings.
    """

    folders: tuple[str, ...] = ()
    levels: tuple[str, ...] = ()
    seeds: tuple[int, ...] = ()
    output_dir: Path = Path()
    line: CommandLine = field(default_factory=lambda: CommandLine((), ()))
    out: Path | None = None
    by_nemo_run: bool = False

    @classmethod
    def of(cls, arguments: Sequence[str]) -> CompareLine:
        """Read a command line.

        Raises:
            ValueError: a folder that does not exist, folders and overrides at once, fewer than two levels, an unknown
                level, a bad seed or setting.
            TypeError: an unknown setting, or one that the comparison makes itself.
        """
        words, out = _take_out(list(arguments))
        by_nemo_run = "--nemo-run" in words
        line = CommandLine.of([word for word in words if word != "--nemo-run"])
        folders = tuple(word for word in line.overrides if _is_folder(word))
        overrides = tuple(word for word in line.overrides if word not in folders)
        if folders and (overrides or line.flags or by_nemo_run):
            other = [*line.flags, *overrides, *["--nemo-run"] * by_nemo_run][0]
            raise ValueError(f"compare takes folders of runs, or settings of trainings: not {folders[0]} and {other}.")
        if not folders:
            return _trainings(replace(line, overrides=overrides), out, by_nemo_run)
        for folder in folders:
            if not Path(folder).exists():
                raise ValueError(f"{folder} does not exist.")
        return cls(folders, out=out)


def _take_out(words: list[str]) -> tuple[list[str], Path | None]:
    """The words without ``--out``, and its value."""
    for index, word in enumerate(words):
        name, equals, value = word.partition("=")
        if name == "--out":
            taken = [value] if equals else words[index + 1 : index + 2]
            if not taken or not taken[0]:
                raise ValueError("--out needs the path of an HTML file.")
            return words[:index] + words[index + (1 if equals else 2) :], Path(taken[0])
    return words, None


def _is_folder(word: str) -> bool:
    return ("=" not in word and not word.startswith("~")) or Path(word).is_dir()


def _trainings(line: CommandLine, out: Path | None, by_nemo_run: bool) -> CompareLine:
    if line.is_multirun:
        raise ValueError("compare trains every level with every seed without -m.")
    check_overrides(line)
    keys = [override.key_or_group for override in line.parsed]
    for name, instead in _TAKEN.items():
        if name in keys:
            raise TypeError(f"{name} is not read by compare: use {instead}.")
    given = {name: word.partition("=")[2] for name, word in zip(keys, line.overrides, strict=True) if name in _OWN}
    levels = tuple(dict.fromkeys(level.strip() for level in given.get("precision", "").split(",") if level.strip()))
    if len(levels) < 2:
        raise ValueError("compare needs two levels or more: precision=bf16_mixed,bf16_with_fp8_mixed,msamp_o2.")
    others = tuple(word for name, word in zip(keys, line.overrides, strict=True) if name not in _OWN)
    folder = given.get("output_dir") or f"outputs/compare/{datetime.now():%Y-%m-%d_%H-%M-%S}"
    line = with_plus(replace(line, overrides=others))
    found = CompareLine((), levels, _seeds(given.get("seeds", "1")), Path(folder), line, out, by_nemo_run)
    for level in levels:
        check_composed(line, f"precision={level}", f"output_dir={folder}", "monitor=on")
    return found


def _seeds(text: str) -> tuple[int, ...]:
    """``3`` is 1, 2 and 3; ``4,5`` is 4 and 5."""
    try:
        numbers = [int(part) for part in text.strip("[]").split(",")]
    except ValueError:
        raise ValueError(f"seeds={text} must be a number of seeds, or seeds with commas between them.") from None
    if "," not in text and "[" not in text:
        if not 1 <= numbers[0] <= 100:
            raise ValueError(f"seeds={text} must be from 1 to 100 seeds, or seeds with commas between them.")
        numbers = list(range(1, numbers[0] + 1))
    for number in numbers:
        check_value("seeds", number, Seed)
    return tuple(dict.fromkeys(numbers))

"""The command ``nemo-lowprec migrate``: reads scripts, prints or writes what changes, and lists what does not."""

from __future__ import annotations

import difflib
import os
import stat
import sys
from pathlib import Path

from nemo_lowprec.checkpoint.writing import file_in_place
from nemo_lowprec.migrate import accelerate, lightning, msamp
from nemo_lowprec.migrate.edits import edited
from nemo_lowprec.migrate.script import Script

__all__ = ["migrate"]


def migrate(paths: list[str], write: bool = False) -> None:
    """Print a unified diff of each script, or rewrite the scripts.

    On stderr is a line for each place that is not migrated, or that is different afterwards.

    Args:
        paths: Python files.
        write: whether the files are rewritten; no diff is printed then.

    Raises:
        ValueError: a path is no file, or a file is not UTF-8 or no Python; no file is changed.
    """
    scripts = {path: _read(path) for path in dict.fromkeys(paths)}
    results = {}
    for path, script in scripts.items():
        for framework in (lightning, accelerate, msamp):
            framework.find(script)
        results[path] = edited(script)
    for path, script in scripts.items():
        old, new = script.module, results[path]
        notes = {text: script.line(node) for node, text in reversed(script.change.notes)}  # each at its first place
        found = {(line, text) for text, line in notes.items()}
        found |= {(script.line(node), f"Not migrated: {text}") for node, text in script.obstacles}
        for line, text in sorted(found):
            print(f"{path}:{line}: {text}", file=sys.stderr)
        if new.bytes == old.bytes:
            if not script.obstacles:
                print(f"{path} needs no change.", file=sys.stderr)
        elif write:
            _write(Path(path), new.bytes)
            print(f"{path} is rewritten.", file=sys.stderr)
        else:
            print(_diff(path, old.bytes.decode(), new.bytes.decode()), end="")


def _read(path: str) -> Script:
    if not Path(path).exists():
        raise ValueError(f"{path} does not exist.")
    if not Path(path).is_file():
        raise ValueError(f"{path} is no file; name the scripts in it.")
    try:
        return Script(Path(path).read_bytes())
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}.") from None
    except ValueError as error:
        raise ValueError(f"{path} cannot be migrated: {error}.") from None


def _write(path: Path, source: bytes) -> None:
    path = path.resolve()  # a link stays a link
    mode = stat.S_IMODE(path.stat().st_mode)
    with file_in_place(path) as file:
        os.fchmod(file.fileno(), mode)
        file.write(source)


def _diff(path: str, old: str, new: str) -> str:
    lines = difflib.unified_diff(_lines(old), _lines(new), f"a/{path}", f"b/{path}")
    return "".join(line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines)


def _lines(text: str) -> list[str]:
    """Lines with their ends; a form feed ends no line."""
    return [f"{line}\n" for line in text.split("\n")[:-1]] + ([last] if (last := text.split("\n")[-1]) else [])

"""Put a folder in the place of another one (or of a file), so that there is a complete one at every moment."""

from __future__ import annotations

import ctypes
import os
import shutil
import sys
from contextlib import suppress
from pathlib import Path

from nemo_lowprec.checkpoint.writing import sync_folder

__all__ = ["clear", "part_of", "put_in_place", "recover", "remove", "start_part"]

_AT_FDCWD, _RENAME_EXCHANGE = -100, 2  # linux/fcntl.h, linux/fs.h


def part_of(path: Path) -> Path:
    """The folder beside ``path`` in which its contents are written."""
    return path.with_name(f".{path.name}.part")


def _old_of(path: Path) -> Path:
    return path.with_name(f".{path.name}.old")


def start_part(path: Path) -> None:
    """Make ``part_of(path)`` an empty folder, whatever a run that was killed has left."""
    recover(path)
    for left in (part_of(path), _old_of(path)):
        clear(left)
    part_of(path).mkdir(parents=True)


def put_in_place(path: Path) -> None:
    """Rename ``part_of(path)``, which is complete, to ``path``, and remove what was there."""
    part, old = part_of(path), _old_of(path)
    was_there = os.path.lexists(path)
    if was_there and _exchange(part, path):
        old = part
    else:
        if was_there:
            os.replace(path, old)  # a file system without exchange: ``recover`` knows this name
        os.replace(part, path)
    sync_folder(path.parent)
    clear(old)


def remove(path: Path) -> None:
    """Remove the folder ``path``, if it is there; it is whole until nothing is."""
    clear(part_of(path))
    with suppress(FileNotFoundError):
        os.replace(path, part_of(path))
    clear(part_of(path))


def clear(path: Path) -> None:
    """Remove a file or a folder, if it is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def recover(path: Path) -> None:
    """Where a run was killed between two renames, take back what was there; several processes may try."""
    if not path.exists() and _old_of(path).exists():
        with suppress(FileNotFoundError):  # another one has
            os.replace(_old_of(path), path)


def _exchange(one: Path, other: Path) -> bool:
    """Exchange two folders, or a folder and a file, at once; whether the system can."""
    if not sys.platform.startswith("linux"):
        return False
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    return rename is not None and not rename(
        _AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE
    )

"""Files and folders that appear complete: written beside their place, synced to the disk, then renamed.

A file is written to ``.NAME.PID.part``, a folder to ``.NAME.part``. Where the system cannot exchange two names at once,
the earlier folder is ``.NAME.old`` between two renames; ``recover`` knows this name.
"""

from __future__ import annotations

import ctypes
import io
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

_EARLIER = "; an earlier checkpoint is as it was."
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2  # linux/fcntl.h, linux/fs.h


class NotWrittenError(RuntimeError, OSError):
    """A file or folder could not be written: a full disk, no permission. An earlier file or folder is unchanged."""


def _failures(error: BaseException) -> list[BaseException] | None:
    """The failures of processes in torch's CheckpointException, which is no Exception; None for any other error."""
    module = sys.modules.get("torch.distributed.checkpoint.api")  # who raises one has imported it
    if module is None or not isinstance(error, module.CheckpointException):
        return None
    return [failure[0] for failure in error.failures.values()]


def system_error(error: BaseException | None, depth: int = 8) -> OSError | None:
    """The system's error behind an error of torch: in its context, or among the failures of other processes."""
    if error is None or not depth:
        return None
    failures = _failures(error)
    if failures is not None:
        return next(filter(None, (system_error(failure, depth - 1) for failure in failures)), None)
    if isinstance(error, OSError):
        return error
    return system_error(error.__cause__, depth - 1) or system_error(error.__context__, depth - 1)


def raise_not_written(path: str | os.PathLike[str], error: BaseException, kept: str = _EARLIER) -> None:
    """Raise one sentence for an error of the system that has stopped the writing of ``path``; else return.

    Args:
        path: as the user knows the file or folder.
        error: of any library.
        kept: the end of the sentence.

    Raises:
        NotWrittenError: naming ``path`` and the cause.
    """
    if isinstance(error, (NotWrittenError, ValueError, TypeError)):
        return  # sentences already
    found = system_error(error)
    if found is not None:
        cause = found.strerror or str(found)
    elif "(os error " in str(error):  # of libraries written in Rust: safetensors, tokenizers
        cause = str(error)
    elif (failures := _failures(error)) is not None:  # the callers expect an Exception
        cause = next((str(failure).partition("\n")[0] for failure in failures), "torch failed")
    else:
        return
    raise NotWrittenError(f"{path} could not be written: {cause}{kept}") from error


@contextmanager
def writing(path: str | os.PathLike[str], kept: str = _EARLIER) -> Iterator[None]:
    """Call ``raise_not_written`` for the errors of the block, which writes ``path``."""
    try:
        yield
    except BaseException as error:
        if isinstance(error, Exception) or _failures(error) is not None:
            raise_not_written(path, error, kept)
        raise


def sync_file(path: Path) -> None:
    """Flush the contents of a file, or the names in a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# A file.


class _Remembering(io.FileIO):
    """A file that keeps the first error of its writes, which torch replaces by an error of its own."""

    failed: OSError | None = None

    def write(self, data: object) -> int:
        try:
            return super().write(data)  # type: ignore[arg-type]
        except OSError as error:
            self.failed = self.failed or error
            raise


@contextmanager
def file_in_place(place: Path) -> Iterator[BinaryIO]:
    """A file to write, which is renamed to ``place`` when it is complete and on the disk.

    Raises:
        NotWrittenError: the file could not be written, and is removed; an earlier file at ``place`` is unchanged.
    """
    part = place.with_name(f".{place.name}.{os.getpid()}.part")
    with writing(place):
        place.parent.mkdir(parents=True, exist_ok=True)
        for left in place.parent.glob(f".{place.name}.*.part"):  # by a run that was killed
            left.unlink(missing_ok=True)
        raw = _Remembering(part, "wb")
        file = io.BufferedWriter(raw)
        try:
            yield file
            file.flush()
            os.fsync(raw.fileno())
            file.close()
            os.replace(part, place)
        except BaseException as error:
            for close in (file.close, raw.close, part.unlink):  # the first writes the rest of the buffer
                with suppress(OSError):
                    close()
            if raw.failed is not None and isinstance(error, Exception):
                raise raw.failed from error
            raise
        sync_file(place.parent)


# A folder.


def part_of(path: Path) -> Path:
    """The folder beside ``path`` in which the contents of ``path`` are written."""
    return path.with_name(f".{path.name}.part")


def _old_of(path: Path) -> Path:
    return path.with_name(f".{path.name}.old")


def start_part(path: Path) -> None:
    """Make ``part_of(path)`` an empty folder, and remove what a killed run has left."""
    recover(path)
    for left in (part_of(path), _old_of(path)):
        clear(left)
    part_of(path).mkdir(parents=True)


def put_in_place(path: Path) -> None:
    """Rename ``part_of(path)``, which is complete, to ``path``, and remove the earlier file or folder at ``path``.

    torch has synced the ``.distcp`` files in the folder; the other files are synced here.
    """
    part, old = part_of(path), _old_of(path)
    for file in part.iterdir():
        if file.suffix != ".distcp":
            sync_file(file)
    was_there = os.path.lexists(path)
    if was_there and _exchange(part, path):
        old = part
    else:
        if was_there:
            os.replace(path, old)
        os.replace(part, path)
    sync_file(path.parent)
    clear(old)


def remove(path: Path) -> None:
    """Remove the folder ``path``, if there is one, under another name: ``path`` never names a part of it."""
    clear(part_of(path))
    with suppress(FileNotFoundError):
        os.replace(path, part_of(path))
    clear(part_of(path))


def clear(path: Path) -> None:
    """Remove a file or a folder, if there is one."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def recover(path: Path) -> None:
    """Restore the earlier folder where a run was killed between two renames; several processes may try."""
    if not path.exists() and _old_of(path).exists():
        with suppress(FileNotFoundError):  # another process has
            os.replace(_old_of(path), path)


def _exchange(one: Path, other: Path) -> bool:
    """Exchange two folders, or a folder and a file, at once. Returns whether the system can."""
    if not sys.platform.startswith("linux"):
        return False
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    return rename is not None and not rename(
        _AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE
    )

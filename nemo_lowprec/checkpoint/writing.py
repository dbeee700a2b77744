"""Files and folders that are written beside their place and renamed when they are on the disk."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from torch.distributed.checkpoint.api import CheckpointException

__all__ = [
    "NotWrittenError",
    "file_in_place",
    "raise_not_written",
    "sync_file",
    "sync_folder",
    "system_error",
    "writing",
]

_EARLIER = "; an earlier checkpoint is as it was."


class NotWrittenError(RuntimeError, OSError):
    """A file or folder could not be written: a full disk, a folder without permission. What was there is there."""


def system_error(error: BaseException | None, depth: int = 8) -> OSError | None:
    """The system's error behind one of torch's, which hides it in its context or (of other processes) in its text."""
    if error is None or not depth:
        return None
    if isinstance(error, CheckpointException):
        found = (system_error(failure[0], depth - 1) for failure in error.failures.values())
        return next(filter(None, found), None)
    if isinstance(error, OSError):
        return error
    return system_error(error.__cause__, depth - 1) or system_error(error.__context__, depth - 1)


def raise_not_written(path: str | os.PathLike[str], error: BaseException, kept: str = _EARLIER) -> None:
    """Raise what stopped the writing of ``path`` as one sentence, where it is an error of the system.

    Args:
        path: as the user knows it.
        error: of any library.
        kept: what the sentence ends with.

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
    elif isinstance(error, CheckpointException):  # no Exception, which others expect
        cause = next((str(failure[0]).partition("\n")[0] for failure in error.failures.values()), "torch failed")
    else:
        return
    raise NotWrittenError(f"{path} could not be written: {cause}{kept}") from error


@contextmanager
def writing(path: str | os.PathLike[str], kept: str = _EARLIER) -> Iterator[None]:
    """Around what writes ``path``: ``raise_not_written``."""
    try:
        yield
    except (Exception, CheckpointException) as error:
        raise_not_written(path, error, kept)
        raise


class _Remembering(io.FileIO):
    """A file that keeps the first error of its writes, which torch replaces by one of its own."""

    failed: OSError | None = None

    def write(self, data: object) -> int:
        try:
            return super().write(data)  # type: ignore[arg-type]
        except OSError as error:
            self.failed = self.failed or error
            raise


@contextmanager
def file_in_place(place: Path) -> Iterator[BinaryIO]:
    """A file to write, which is ``place`` as soon as it is complete and on the disk.

    It lies beside ``place`` until then, and is removed where that fails.

    Raises:
        NotWrittenError: it could not be written; a file that was at ``place`` is there.
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
            with suppress(OSError):
                file.close()  # which writes what is left
            with suppress(OSError):
                raw.close()
            with suppress(OSError):
                part.unlink(missing_ok=True)
            if raw.failed is not None and isinstance(error, Exception):
                raise raw.failed from error
            raise
        sync_folder(place.parent)


def sync_file(path: Path) -> None:
    """Have the contents of a file on the disk."""
    with path.open("rb") as file:
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Have what was renamed in ``folder`` on the disk, too."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

"""Files and folders that are written beside their place and renamed when they are on the disk."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from safetensors import SafetensorError
from torch.distributed.checkpoint.api import CheckpointException

__all__ = ["NotWrittenError", "file_in_place", "sync_file", "sync_folder", "writing"]

_EARLIER = "; an earlier checkpoint is as it was."


class NotWrittenError(RuntimeError, OSError):
    """A file or folder could not be written: a full disk, a folder without permission. What was there is there."""


def _system_error(error: BaseException | None, depth: int = 8) -> OSError | None:
    """The system's error behind one of torch's, which hides it in its context or (of other processes) in its text."""
    if error is None or not depth:
        return None
    if isinstance(error, CheckpointException):
        found = (_system_error(failure[0], depth - 1) for failure in error.failures.values())
        return next(filter(None, found), None)
    if isinstance(error, OSError):
        return error
    return _system_error(error.__cause__, depth - 1) or _system_error(error.__context__, depth - 1)


@contextmanager
def writing(path: str | os.PathLike[str], kept: str = _EARLIER) -> Iterator[None]:
    """Around what writes ``path``: the system's errors become one sentence.

    Args:
        path: as the user knows it.
        kept: what the sentence ends with.

    Raises:
        NotWrittenError: naming ``path`` and the cause.
    """
    try:
        yield
    except NotWrittenError:
        raise
    except (OSError, RuntimeError, CheckpointException, SafetensorError) as error:
        found = _system_error(error)
        if found is not None:
            cause = found.strerror or str(found)
        elif isinstance(error, SafetensorError):
            cause = str(error)
        else:
            raise
        raise NotWrittenError(f"{path} could not be written: {cause}{kept}") from error


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

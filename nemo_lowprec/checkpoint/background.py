"""Checkpoint folders that are written while training goes on."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from nemo_lowprec.checkpoint.atomic_rename import remove
from nemo_lowprec.checkpoint.sharded_folder import FolderContents
from nemo_lowprec.checkpoint.writing import NotWrittenError

__all__ = ["BackgroundWriter"]


class BackgroundWriter:
    """Writes one checkpoint at a time in a thread, from copies in the CPU's memory; made on all processes.

    A process group of gloo is the thread's own, since the training's collectives go on beside it. A checkpoint that
    is to be removed meanwhile is removed when the new one is complete.

    Args:
        timeout: after which a process that waits for another one stops with an error; None for gloo's own.
    """

    def __init__(self, timeout: timedelta | None = None) -> None:
        self._group = dist.new_group(backend="gloo", timeout=timeout)
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._pending: Future[None] | None = None
        self._path: Path | None = None
        self._removed: list[Path] = []

    def write(self, checkpoint: dict[str, Any], path: Path) -> None:
        """Copy what is to be written, and return; called on all processes.

        Raises:
            RuntimeError: an earlier checkpoint could not be written.
        """
        self.wait()
        contents = FolderContents(checkpoint, copied=True)
        contents.start(path)
        self._path, self._pending = path, self._thread.submit(self._write, contents, path)

    def _write(self, contents: FolderContents, path: Path) -> None:
        contents.finish(path, self._group)
        while self._removed:
            remove(self._removed.pop())

    def remove(self, path: Path) -> None:
        """Remove an earlier checkpoint; not before the one that is being written is complete."""
        if self._pending is None or path == self._path:
            self.wait()
            remove(path)
            return
        self._removed.append(path)
        if self._pending.done():  # perhaps before it saw the list
            self.wait()

    def wait(self) -> None:
        """Wait for the checkpoint that is being written.

        Raises:
            RuntimeError: it could not be written.
        """
        pending, self._pending = self._pending, None
        if pending is None:
            return
        try:
            pending.result()
        except NotWrittenError:
            raise
        except Exception as error:
            raise RuntimeError(f"{self._path} could not be written; an earlier checkpoint is as it was.") from error
        while self._removed:
            remove(self._removed.pop())

    def close(self) -> None:
        """Wait, and end the thread."""
        try:
            self.wait()
        finally:
            self._thread.shutdown()
            dist.destroy_process_group(self._group)

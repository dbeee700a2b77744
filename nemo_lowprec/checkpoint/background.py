"""Writes a sharded folder in a thread while training goes on."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from nemo_lowprec.checkpoint.sharded_folder import begin_sharded
from nemo_lowprec.checkpoint.writing import NotWrittenError, remove


class BackgroundWriter:
    """Writes one checkpoint at a time in a thread, from copies in the CPU's memory; made on all processes.

    The thread has a process group of gloo, as the training calls collectives at the same time. A checkpoint that is to
    be removed meanwhile is removed when the new checkpoint is complete.

    Args:
        timeout: of the collectives in the thread; None for gloo's default.
    """

    def __init__(self, timeout: timedelta | None = None) -> None:
        self._group = dist.new_group(backend="gloo", timeout=timeout)
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._pending: Future[None] | None = None
        self._path: Path | None = None
        self._removed: list[Path] = []

    def write(self, checkpoint: dict[str, Any], path: Path) -> None:
        """Copy the tensors of ``checkpoint``, start to write, and return; called on all processes.

        Raises:
            RuntimeError: the checkpoint before could not be written.
        """
        self.wait()
        finish = begin_sharded(checkpoint, path, copied=True)
        self._path, self._pending = path, self._thread.submit(self._remove_earlier, finish)

    def _remove_earlier(self, finish: Callable[..., None] | None = None) -> None:
        """Remove the checkpoints that are to be removed, once ``finish`` has written the new one."""
        if finish is not None:
            finish(self._group)
        while self._removed:
            remove(self._removed.pop())

    def remove(self, path: Path) -> None:
        """Remove a checkpoint, once the checkpoint in the thread is complete."""
        self._removed.append(path)
        if self._pending is None or path == self._path or self._pending.done():
            self.wait()

    def wait(self) -> None:
        """Wait for the thread.

        Raises:
            RuntimeError: its checkpoint could not be written.
        """
        pending, self._pending = self._pending, None
        try:
            if pending is not None:
                pending.result()
        except NotWrittenError:
            raise
        except Exception as error:
            raise RuntimeError(f"{self._path} could not be written; an earlier checkpoint is as it was.") from error
        self._remove_earlier()

    def close(self) -> None:
        """Wait, and end the thread."""
        try:
            self.wait()
        finally:
            self._thread.shutdown()
            dist.destroy_process_group(self._group)

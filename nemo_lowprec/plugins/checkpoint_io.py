"""Lightning's CheckpointIO for a level: writes a checkpoint as a whole or not at all, and compares checksums."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.fabric.utilities.cloud_io import get_filesystem
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from lightning.pytorch.strategies import Strategy
from typing_extensions import override

from nemo_lowprec.checkpoint.torch_zip import check_file, reading
from nemo_lowprec.checkpoint.writing import NotWrittenError, file_in_place
from nemo_lowprec.comm import raise_together


class AtomicFileIO(TorchCheckpointIO):
    """Writes a file beside its place, renames it when it is on the disk, and reads no damaged file.

    Lightning writes to the folder of temporary files, copies the file to another disk over the earlier checkpoint, and
    compares no checksums. Lightning still writes remote paths (``s3://``).
    """

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None) -> None:
        if storage_options is not None or "://" in str(path):
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        with file_in_place(Path(path)) as file:
            torch.save(checkpoint, file)

    @override
    def load_checkpoint(self, path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Compare the checksums of a file, and open it.

        Raises:
            ValueError: the file is damaged.
        """
        if "://" in str(path):
            return self._load_remote(str(path), *args, **kwargs)
        check_file(Path(path).expanduser())
        with reading(path):
            return super().load_checkpoint(path, *args, **kwargs)

    def _load_remote(self, url: str, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Download the checkpoint, and read the local file."""
        with TemporaryDirectory() as folder:
            local = Path(folder) / "checkpoint.ckpt"
            get_filesystem(url).get_file(url, str(local))
            try:
                return self.load_checkpoint(local, *args, **kwargs)
            except ValueError as error:
                raise ValueError(str(error).replace(str(local), url)) from error


class AtomicCheckpointIO(AtomicFileIO):
    """``AtomicFileIO`` for checkpoints of the Trainer."""

    @override
    def load_checkpoint(self, path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Compare the checksums of a checkpoint, and open it.

        Raises:
            ValueError: the file is damaged, or no checkpoint of a LightningModule.
        """
        checkpoint = super().load_checkpoint(path, *args, **kwargs)
        if not isinstance(checkpoint, dict) or "state_dict" not in checkpoint:
            raise ValueError(f"{path} is no checkpoint of a LightningModule: it has no 'state_dict'.")
        return checkpoint


# Lightning restores weights before it calls any hook of a Precision plugin, and saves without calling one. So the two
# methods of the class are wrapped, for strategies whose plugin has an ``own_checkpoint_io``.

_load_checkpoint, _save_checkpoint = Strategy.load_checkpoint, Strategy.save_checkpoint


def _of_plugin(strategy: Strategy) -> type[TorchCheckpointIO] | None:
    return getattr(strategy.precision_plugin, "own_checkpoint_io", None)


@contextmanager
def _own_io(strategy: Strategy) -> Iterator[None]:
    """Replace Lightning's default CheckpointIO by the plugin's; any other CheckpointIO is the user's choice."""
    before, own = strategy.checkpoint_io, _of_plugin(strategy)
    if own is not None and type(before) is TorchCheckpointIO:
        strategy.checkpoint_io = own()
    try:
        yield
    finally:
        strategy.checkpoint_io = before


@wraps(_load_checkpoint)
def _load_with_own_io(self: Strategy, *args: Any, **kwargs: Any) -> dict[str, Any]:
    own = _of_plugin(self)
    if own is not None and isinstance(self.checkpoint_io, AsyncCheckpointIO):  # reads with Lightning's default
        return own().load_checkpoint(*args, **kwargs)
    with _own_io(self):
        return _load_checkpoint(self, *args, **kwargs)


@contextmanager
def writing_together(strategy: Any) -> Iterator[None]:
    """Context of all processes of ``strategy``, of which one writes: the others would wait for a process that fails.

    Raises:
        NotWrittenError: the writing process's, on all processes.
    """
    error: NotWrittenError | None = None
    try:
        yield
    except NotWrittenError as found:
        error = found
    if getattr(strategy, "world_size", 1) > 1:
        raise_together(error)
    elif error is not None:
        raise error


@wraps(_save_checkpoint)
def _save_together(self: Strategy, *args: Any, **kwargs: Any) -> None:
    if _of_plugin(self) is None:
        _save_checkpoint(self, *args, **kwargs)
        return
    with writing_together(self), _own_io(self):
        _save_checkpoint(self, *args, **kwargs)


Strategy.load_checkpoint = _load_with_own_io  # type: ignore[method-assign]
Strategy.save_checkpoint = _save_together  # type: ignore[method-assign]

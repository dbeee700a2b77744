"""Checkpoints that are there in full or not at all, and that are read as they were written."""

from __future__ import annotations

from functools import wraps
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch.strategies import Strategy
from typing_extensions import override

from nemo_lowprec.checkpoint.torch_zip import check_file, reading
from nemo_lowprec.checkpoint.writing import file_in_place

__all__ = ["AtomicCheckpointIO", "use_own_io"]


class AtomicCheckpointIO(TorchCheckpointIO):
    """Writes a checkpoint beside its place, renames it when it is on the disk, and reads none that is damaged.

    Lightning writes to the folder of temporary files, from where a file that goes to another disk is copied, over the
    one that was there; and compares no checksums. Remote paths (``s3://``) stay Lightning's.
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
        """A checkpoint whose checksums hold.

        Raises:
            ValueError: what is wrong with ``path``, in one sentence.
        """
        if "://" in str(path):
            return super().load_checkpoint(path, *args, **kwargs)
        check_file(Path(path))
        with reading(path):
            checkpoint = super().load_checkpoint(path, *args, **kwargs)
        if not isinstance(checkpoint, dict) or "state_dict" not in checkpoint:
            raise ValueError(f"{path} is no checkpoint of a LightningModule: it has no 'state_dict'.")
        return checkpoint


def use_own_io(strategy: Strategy) -> None:
    """Let ``strategy`` read and write with ``AtomicCheckpointIO``, unless its user has chosen another way."""
    if type(strategy.checkpoint_io) is TorchCheckpointIO:
        strategy.checkpoint_io = AtomicCheckpointIO()


_load_checkpoint = Strategy.load_checkpoint


@wraps(_load_checkpoint)
def _load_with_own_io(self: Strategy, *args: Any, **kwargs: Any) -> dict[str, Any]:
    # Lightning restores weights before it calls anything of a Precision plugin: only here can a level's own way to
    # read be put in, and only Trainers with a level are touched.
    if getattr(self.precision_plugin, "reads_with_own_io", False):
        use_own_io(self)
    return _load_checkpoint(self, *args, **kwargs)


Strategy.load_checkpoint = _load_with_own_io  # type: ignore[method-assign]

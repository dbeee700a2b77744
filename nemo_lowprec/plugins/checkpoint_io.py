"""Checkpoints that are there in full or not at all."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins import TorchCheckpointIO
from typing_extensions import override

__all__ = ["AtomicCheckpointIO", "sync_folder"]


class AtomicCheckpointIO(TorchCheckpointIO):
    """Writes a checkpoint beside its place, and renames it when it is on the disk.

    Lightning writes to the folder of temporary files, from where a file that goes to another disk is copied, over the
    one that was there. Remote paths (``s3://``) stay Lightning's.
    """

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None) -> None:
        if storage_options is not None or "://" in str(path):
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        place = Path(path)
        place.parent.mkdir(parents=True, exist_ok=True)
        for left in place.parent.glob(f".{place.name}.*.part"):  # by a run that was killed
            left.unlink(missing_ok=True)
        part = place.with_name(f".{place.name}.{os.getpid()}.part")
        with part.open("wb") as file:
            torch.save(checkpoint, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, place)
        sync_folder(place.parent)


def sync_folder(folder: Path) -> None:
    """Have what was renamed in ``folder`` on the disk, too."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

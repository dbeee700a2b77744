"""The weights in a checkpoint on the disk, one file or a folder, opened without reading the optimizer states."""

from __future__ import annotations

import pickle
import zipfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nemo_lowprec.models.megatron_saved import is_of_megatron, open_of_megatron
from nemo_lowprec.models.words import first_of
from nemo_lowprec.strategies.replace import recover
from nemo_lowprec.strategies.sharded_checkpoint import META, is_folder, open_folder, read_weights

__all__ = ["SavedWeights", "open_checkpoint"]


@dataclass(frozen=True)
class SavedWeights:
    """Weights that are read when they are asked for.

    Attributes:
        tensors: shapes and dtypes by name; their values are not to be read here.
        rest: everything else in the checkpoint but optimizer states: hyperparameters, the plugin's state.
        path: of the checkpoint.
    """

    tensors: dict[str, Tensor]
    rest: dict[str, Any]
    path: Path
    _read: Callable[[dict[str, Tensor]], Iterable[tuple[str, Tensor]]]

    def read(self, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
        """(name, whole tensor on the CPU), in the order of ``names``. A file's tensors are mapped into memory."""
        yield from self._read({name: self.tensors[name] for name in names})


def open_checkpoint(path: Path) -> SavedWeights:
    """Open a Lightning file, or a folder of ``lowprec_sharded`` or ``MegatronStrategy``; needs no GPU or process group.

    Raises:
        ValueError: ``path`` does not exist, is incomplete, or is no checkpoint of a LightningModule.
    """
    recover(path)
    if not path.exists():
        raise ValueError(f"{path} does not exist.")
    if path.is_dir() and is_folder(path) and is_of_megatron(path):
        rest = _guarded(path, lambda folder: torch.load(folder / META, map_location="cpu", weights_only=True))
        named, read = open_of_megatron(path, rest.get("hyper_parameters", {}))
        return SavedWeights(named, rest, path, read)
    rest, tensors = _guarded(path, _open_folder if path.is_dir() else _open_file)
    foreign = [name for name, value in tensors.items() if not isinstance(value, Tensor)]
    if foreign:
        raise ValueError(f"{path} holds {first_of(foreign)} among its weights, which is no tensor.")
    if path.is_dir():
        return SavedWeights(tensors, rest, path, lambda wanted: read_weights(path, wanted))
    return SavedWeights(tensors, rest, path, lambda wanted: wanted.items())


def _open_file(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    # The directory of a zip file is written last.
    if not zipfile.is_zipfile(path):
        raise ValueError(f"{path} is no complete checkpoint: its writing was cut short, or it is another kind of file.")
    # Mapped: what is not read, such as the optimizer states, takes no memory.
    checkpoint = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    weights = checkpoint.pop("state_dict", None) if isinstance(checkpoint, dict) else None
    if not isinstance(weights, dict):
        raise ValueError(f"{path} is no checkpoint of a LightningModule: it has no 'state_dict'.")
    return {k: v for k, v in checkpoint.items() if k != "optimizer_states"}, weights


def _open_folder(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    if not is_folder(path):
        raise ValueError(
            f"{path} is no complete sharded checkpoint: its writing was cut short, or it is another kind of folder."
        )
    rest, weights = open_folder(path)
    if not weights:
        raise ValueError(
            f"{path} was not written by lowprec_sharded. A folder that another of Lightning's strategies has written "
            "is made one file by: python -m lightning.pytorch.utilities.consolidate_checkpoint"
        )
    return rest, weights


def _guarded(path: Path, opens: Callable[[Path], Any]) -> Any:
    try:
        return opens(path)
    except pickle.UnpicklingError as error:
        found = str(error).partition("GLOBAL ")[2].partition(" ")[0] or "objects of Python"
        raise ValueError(
            f"{path} holds {found} beside tensors and plain values, and opening it may run code. If you trust it, "
            "allow that with torch.serialization.add_safe_globals and call nemo_lowprec.models.export_checkpoint."
        ) from error
    except (RuntimeError, EOFError) as error:
        raise ValueError(f"{path} is damaged: {str(error).splitlines()[0]}") from error

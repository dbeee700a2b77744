"""Opens the weights of a checkpoint, a file or a folder, without reading the optimizer states."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from nemo_lowprec.checkpoint.sharded_folder import META, is_folder, open_folder, read_weights
from nemo_lowprec.checkpoint.torch_zip import load
from nemo_lowprec.checkpoint.writing import recover
from nemo_lowprec.lines import abbreviate
from nemo_lowprec.models.megatron_saved import is_of_megatron, open_of_megatron


@dataclass(frozen=True)
class SavedWeights:
    """The weights of one checkpoint; ``read`` loads their values.

    Attributes:
        tensors: tensors by name, of which only shape and dtype may be read.
        rest: the checkpoint without weights and optimizer states: hyperparameters, the plugin's state.
        path: path of the checkpoint.
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
        ValueError: ``path`` does not exist, is incomplete or damaged, is no checkpoint of a LightningModule, or holds
            objects that may run code.
    """
    recover(path)
    if path.is_dir() and is_folder(path) and is_of_megatron(path):
        rest = load(path / META)
        named, read = open_of_megatron(path, rest.get("hyper_parameters", {}))
        return SavedWeights(named, rest, path, read)
    rest, tensors = _open_folder(path) if path.is_dir() else _open_file(path)
    foreign = [name for name, value in tensors.items() if not isinstance(value, Tensor)]
    if foreign:
        raise ValueError(f"{path} holds {abbreviate(foreign)} among its weights, which is no tensor.")
    read = partial(read_weights, path) if path.is_dir() else dict.items
    return SavedWeights(tensors, rest, path, read)


def _open_file(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    # The file is memory-mapped, so that optimizer states, which nothing reads, take no memory.
    checkpoint = load(path, only="state_dict", mmap=True)
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

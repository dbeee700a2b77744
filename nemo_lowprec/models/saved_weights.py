"""Opens the weights of a checkpoint without the optimizer states, a GPU, a process group or Megatron-core."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from nemo_lowprec.checkpoint.dcp_folder import CheckedReader, read_index, read_tensors
from nemo_lowprec.checkpoint.sharded_folder import META, is_folder, open_folder, read_weights
from nemo_lowprec.checkpoint.torch_zip import load, load_lightning
from nemo_lowprec.checkpoint.writing import recover
from nemo_lowprec.lines import abbreviate
from nemo_lowprec.models.causal_lm import CausalLM
from nemo_lowprec.models.megatron_llama import GptArchitecture, gpt_architecture
from nemo_lowprec.models.megatron_weights import EMBEDDING, to_transformers

_MASTERS = "optimizer.state.param."
_STACKED = re.compile(r"(decoder\.layers)\.(?!\d)(.+)")


@dataclass(frozen=True)
class SavedWeights:
    """The weights of one checkpoint; ``read`` loads their values."""

    tensors: dict[str, Tensor]  # by name; only shape and dtype may be read
    rest: dict[str, Any]  # the checkpoint without weights and optimizer states: hyperparameters, the plugin's state
    path: Path  # of the checkpoint
    _read: Callable[[dict[str, Tensor]], Iterable[tuple[str, Tensor]]]

    def read(self, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
        """(name, whole tensor on the CPU), in the order of ``names``. A file's tensors are mapped into memory."""
        yield from self._read({name: self.tensors[name] for name in names})


def open_checkpoint(path: Path) -> SavedWeights:
    """Open a Lightning file, or a folder of ``lowprec_sharded`` or ``MegatronStrategy``.

    The weights of a ``MegatronGPT`` get the names that ``CausalLM`` has for them, and the values of the master weights
    where there are master weights.

    Raises:
        ValueError: ``path`` does not exist, is incomplete or damaged, is no checkpoint of a LightningModule, or holds
            objects that may run code.
    """
    recover(path)
    if not path.is_dir():
        saved = _open_file(path)
    elif not is_folder(path):
        raise ValueError(
            f"{path} is no complete sharded checkpoint: its writing was cut short, or it is another kind of folder."
        )
    else:
        saved = _open_megatron(path) if is_of_megatron(path) else _open_folder(path)
    foreign = [name for name, value in saved.tensors.items() if not isinstance(value, Tensor)]
    if foreign:
        raise ValueError(f"{path} holds {abbreviate(foreign)} among its weights, which is no tensor.")
    return saved


def _open_file(path: Path) -> SavedWeights:
    # The file is memory-mapped, so that optimizer states, which nothing reads, take no memory.
    checkpoint = load_lightning(path, only="state_dict", mmap=True)
    weights = checkpoint.pop("state_dict")
    checkpoint.pop("optimizer_states", None)
    return SavedWeights(weights, checkpoint, path, dict.items)


def _open_folder(path: Path) -> SavedWeights:
    rest, weights = open_folder(path)
    if not weights:
        raise ValueError(
            f"{path} was not written by lowprec_sharded. A folder that another of Lightning's strategies has written "
            "is made one file by: python -m lightning.pytorch.utilities.consolidate_checkpoint"
        )
    return SavedWeights(weights, rest, path, partial(read_weights, path))


# A folder of MegatronStrategy


def _stored(path: Path) -> dict[str, tuple[str, TensorStorageMetadata]]:
    """Key and metadata of each weight by name; the key is the master weight's key where the folder has a master."""
    found = read_index(path).state_dict_metadata
    stored = {name: meta for name, meta in found.items() if isinstance(meta, TensorStorageMetadata)}
    keys = {name: _MASTERS + name if _MASTERS + name in stored else name for name in stored}
    return {name: (key, stored[key]) for name, key in keys.items() if not name.startswith("optimizer.")}


def is_of_megatron(path: Path) -> bool:
    """Whether the folder ``path`` holds a GPTModel's weights under Megatron-core's keys."""
    return EMBEDDING in _stored(path)


def _open_megatron(path: Path) -> SavedWeights:
    rest, stored = load(path / META), _stored(path)
    parameters = inspect.signature(CausalLM).parameters
    arguments = {k: v for k, v in rest.get("hyper_parameters", {}).items() if k in parameters}
    architecture = gpt_architecture(CausalLM(**arguments).transformers_config())

    def renamed(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        tensors = to_transformers(_unstacked(state, architecture), architecture)
        return {f"model.{name}": tensor for name, tensor in tensors.items()}

    def read(wanted: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
        full = renamed(_read_stored(path, stored))
        for name in wanted:
            yield name, full[name]

    kind = max((meta.properties.dtype for _, meta in stored.values()), key=lambda dtype: dtype.itemsize)
    empty = {name: torch.empty(meta.size, dtype=kind, device="meta") for name, (_, meta) in stored.items()}
    return SavedWeights(renamed(empty), rest, path, read)


def _read_stored(path: Path, stored: Mapping[str, tuple[str, TensorStorageMetadata]]) -> dict[str, Tensor]:
    tensors = {key: torch.empty(meta.size, dtype=meta.properties.dtype) for key, meta in stored.values()}
    read_tensors(CheckedReader(path), tensors, alone=True)
    return {name: tensors[key] for name, (key, _) in stored.items()}


def _unstacked(state: Mapping[str, Tensor], architecture: GptArchitecture) -> dict[str, Tensor]:
    """One tensor for each layer's parameter; Megatron-core saves one tensor [layers, ...] for all layers."""
    layers, parameters = architecture.transformer["num_layers"], {}
    for name, tensor in state.items():
        found = _STACKED.fullmatch(name)
        if found is None:
            parameters[name] = tensor
        elif tensor.shape[0] != layers:
            raise ValueError(f"{name} is of {tensor.shape[0]} layers, and the architecture has {layers}.")
        else:
            parameters |= {f"{found[1]}.{i}.{found[2]}": tensor[i] for i in range(layers)}
    return parameters

"""The weights in a checkpoint of ``MegatronStrategy``, as transformers names them; without a GPU or Megatron-core."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from nemo_lowprec.checkpoint.dcp_folder import CheckedReader, read_index, read_tensors
from nemo_lowprec.models.causal_lm import CausalLM
from nemo_lowprec.models.megatron_llama import GptArchitecture, gpt_architecture
from nemo_lowprec.models.megatron_weights import to_transformers

__all__ = ["is_of_megatron", "open_of_megatron"]

_MASTERS = "optimizer.state.param."
_EMBEDDING = "embedding.word_embeddings.weight"
_PREFIX = "model."  # of the transformers model in a CausalLM
_STACKED = re.compile(r"(decoder\.layers)\.(?!\d)(.+)")


def _stored(path: Path) -> dict[str, TensorStorageMetadata]:
    found = read_index(path).state_dict_metadata
    return {name: meta for name, meta in found.items() if isinstance(meta, TensorStorageMetadata)}


def is_of_megatron(path: Path) -> bool:
    """Whether the folder ``path`` holds a GPTModel's weights under Megatron-core's keys."""
    return _EMBEDDING in _stored(path)


def open_of_megatron(path: Path, hparams: Mapping[str, Any]) -> tuple[dict[str, Tensor], Any]:
    """A GPTModel's weights under the names that ``CausalLM`` has for them.

    Args:
        path: the folder.
        hparams: of the ``MegatronGPT`` that was trained.

    Returns:
        for each name a tensor of the meta device; and a function from names to (name, tensor) pairs. Values are the
        masters' where there are any.

    Raises:
        ValueError: the folder does not hold the whole model, or is damaged.
    """
    arguments = {k: v for k, v in hparams.items() if k in inspect.signature(CausalLM).parameters}
    architecture = gpt_architecture(CausalLM(**arguments).transformers_config())
    stored = _stored(path)
    empty = {name: torch.empty(meta.size, device="meta") for name, meta in _chosen(stored).items()}
    tensors = to_transformers(_unstacked(empty, architecture), architecture)
    kinds = {meta.properties.dtype for meta in _chosen(stored).values()}
    kind = max(kinds, key=lambda dtype: dtype.itemsize)
    named = {_PREFIX + name: tensor.to(kind) for name, tensor in tensors.items()}

    def read(wanted: Mapping[str, Tensor] | Iterable[str]) -> Iterator[tuple[str, Tensor]]:
        full = to_transformers(_unstacked(_read(path, stored), architecture), architecture)
        for name in wanted:
            yield name, full[name.removeprefix(_PREFIX)]

    return named, read


def _chosen(stored: Mapping[str, TensorStorageMetadata]) -> dict[str, TensorStorageMetadata]:
    """The keys of the weights, by their names: those of the masters where there are any."""
    weights = {name: meta for name, meta in stored.items() if not name.startswith("optimizer.")}
    return {name: stored.get(_MASTERS + name, meta) for name, meta in weights.items()}


def _read(path: Path, stored: Mapping[str, TensorStorageMetadata]) -> dict[str, Tensor]:
    """The whole model, on the CPU."""
    keys = {name: _MASTERS + name if _MASTERS + name in stored else name for name in _chosen(stored)}
    tensors: dict[str, Any] = {
        key: torch.empty(stored[key].size, dtype=stored[key].properties.dtype) for key in keys.values()
    }
    read_tensors(CheckedReader(path), tensors, alone=True)
    return {name: tensors[key] for name, key in keys.items()}


def _unstacked(state: Mapping[str, Tensor], architecture: GptArchitecture) -> dict[str, Tensor]:
    """Parameters by layer: Megatron-core saves those of all layers as one tensor [layers, ...], under one key."""
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

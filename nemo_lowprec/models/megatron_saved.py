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

_MASTERS = "optimizer.state.param."
_EMBEDDING = "embedding.word_embeddings.weight"
_PREFIX = "model."  # of the transformers model in a CausalLM
_STACKED = re.compile(r"(decoder\.layers)\.(?!\d)(.+)")


def _weights(path: Path) -> dict[str, tuple[str, TensorStorageMetadata]]:
    """Key and metadata of each weight by name; the key is the master weight's key where the folder has a master."""
    found = read_index(path).state_dict_metadata
    stored = {name: meta for name, meta in found.items() if isinstance(meta, TensorStorageMetadata)}
    keys = {name: _MASTERS + name if _MASTERS + name in stored else name for name in stored}
    return {name: (key, stored[key]) for name, key in keys.items() if not name.startswith("optimizer.")}


def is_of_megatron(path: Path) -> bool:
    """Whether the folder ``path`` holds a GPTModel's weights under Megatron-core's keys."""
    return _EMBEDDING in _weights(path)


def open_of_megatron(path: Path, hparams: Mapping[str, Any]) -> tuple[dict[str, Tensor], Any]:
    """A GPTModel's weights under the names that ``CausalLM`` has for them.

    Args:
        path: the folder.
        hparams: of the ``MegatronGPT`` that was trained.

    Returns:
        a meta tensor for each name, and a function that reads (name, tensor) pairs for an iterable of names. The
        function reads master weights where the folder has master weights.

    Raises:
        ValueError: the folder does not hold the whole model, or is damaged.
    """
    arguments = {k: v for k, v in hparams.items() if k in inspect.signature(CausalLM).parameters}
    architecture = gpt_architecture(CausalLM(**arguments).transformers_config())
    weights = _weights(path)
    empty = {name: torch.empty(meta.size, device="meta") for name, (_, meta) in weights.items()}
    tensors = to_transformers(_unstacked(empty, architecture), architecture)
    kind = max((meta.properties.dtype for _, meta in weights.values()), key=lambda dtype: dtype.itemsize)
    named = {_PREFIX + name: tensor.to(kind) for name, tensor in tensors.items()}

    def read(wanted: Mapping[str, Tensor] | Iterable[str]) -> Iterator[tuple[str, Tensor]]:
        full = to_transformers(_unstacked(_read(path, weights), architecture), architecture)
        for name in wanted:
            yield name, full[name.removeprefix(_PREFIX)]

    return named, read


def _read(path: Path, weights: Mapping[str, tuple[str, TensorStorageMetadata]]) -> dict[str, Tensor]:
    """The tensors of the whole model by name, on the CPU."""
    tensors: dict[str, Any] = {key: torch.empty(m.size, dtype=m.properties.dtype) for key, m in weights.values()}
    read_tensors(CheckedReader(path), tensors, alone=True)
    return {name: tensors[key] for name, (key, _) in weights.items()}


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

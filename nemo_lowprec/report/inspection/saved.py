"""Opens a checkpoint for its sizes: names, dtypes and shapes of all tensors, values of the plugin's state only.

No code of a checkpoint is run. A file is memory-mapped; of a folder the index and ``meta.pt`` are read. Checksums are
compared for the bytes that are read, and not for weights and optimizer states.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from nemo_lowprec.checkpoint.dcp_folder import read_index
from nemo_lowprec.checkpoint.partial_gradients import partial_gradients
from nemo_lowprec.checkpoint.sharded_folder import META, is_folder
from nemo_lowprec.checkpoint.torch_zip import check_regular, load, load_lightning
from nemo_lowprec.checkpoint.writing import recover
from nemo_lowprec.compat.tensors import tree_leaves
from nemo_lowprec.optim.storage import MOMENTS
from nemo_lowprec.plugins import LowPrecision
from nemo_lowprec.report.tensor_storage import format_of

WEIGHT, MASTER, GRADIENT, STATES = "Weight", "Master weight", "Weight gradient", "Optimizer states"
FILE, SHARDED, MEGATRON = "a file", "a folder of lowprec_sharded", "a folder of lowprec_megatron"
PLUGIN = LowPrecision.__qualname__  # Lightning's key of the plugin's state
_HISTORIES = "fp8_histories"  # in a folder of MegatronStrategy
# Megatron-core's keys of masters and moments, by parameter or by bucket.
_OF_OPTIMIZER = re.compile(r"(?:experts\.)?optimizer\.(?:state\.(\w+)\..+|distributed\..+\.(\w+))")


@dataclass(frozen=True)
class SavedTensor:
    """One tensor of a checkpoint, without its values.

    Attributes:
        column: of the chart.
        part: the moment's name for optimizer states, ``other`` for their other tensors; empty for other columns.
        format: as in the chart.
        elements, bytes: as saved.
    """

    column: str
    part: str
    format: str
    elements: int
    bytes: int


@dataclass(frozen=True)
class SavedCheckpoint:
    """An opened checkpoint.

    Attributes:
        path: of the file or the folder.
        form: ``FILE``, ``SHARDED`` or ``MEGATRON``.
        tensors: of all columns; tied weights of a file once.
        rest: the checkpoint without weights and optimizer states.
        state: of the Precision plugin; empty for a checkpoint without a level.
        bytes: of the file, or of all files of the folder.
    """

    path: Path
    form: str
    tensors: tuple[SavedTensor, ...]
    rest: dict[str, Any]
    state: dict[str, Any]
    bytes: int


def open_saved(path: Path) -> SavedCheckpoint:
    """Open a Lightning file, or a folder of ``lowprec_sharded`` or ``lowprec_megatron``.

    Raises:
        ValueError: ``path`` does not exist, is incomplete or damaged, is no checkpoint of a LightningModule, or holds
            objects that may run code.
    """
    recover(path)
    if not path.is_dir():
        return _open_file(path)
    if not is_folder(path):
        raise ValueError(
            f"{path} is no checkpoint: it lacks .metadata or {META}, which lowprec_sharded and lowprec_megatron write. "
            "Its writing was cut short, or it is another kind of folder."
        )
    return _open_folder(path)


def _open_file(path: Path) -> SavedCheckpoint:
    rest = load_lightning(path, only=PLUGIN, mmap=True)
    tensors = [*_of_values(WEIGHT, rest.pop("state_dict").values())]
    for name, value in _named(rest.pop("optimizer_states", [])):
        tensors += _of_values(STATES, [value], _part(name))
    tensors += _of_values(GRADIENT, [partial_gradients(rest)])
    return SavedCheckpoint(path, FILE, tuple(tensors), rest, _state_in(rest), path.stat().st_size)


def _state_in(rest: dict[str, Any]) -> dict[str, Any]:
    """The state of this package's plugin, which names its level; empty for a checkpoint without."""
    state = rest.get(PLUGIN)
    return state if isinstance(state, dict) and "level" in state else {}


def _named(tree: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """(innermost key, value) of an optimizer's state dict, whose nesting each optimizer chooses."""
    if isinstance(tree, dict):
        for key, value in tree.items():
            yield from _named(value, str(key))
    elif isinstance(tree, (list, tuple)):
        for value in tree:
            yield from _named(value, name)
    else:
        yield name, tree


def _of_values(column: str, tree: Iterable[Any], part: str = "") -> Iterator[SavedTensor]:
    """Each tensor of ``tree``; tensors that share memory, as tied weights do, count once."""
    seen: set[int] = set()
    for leaf in tree_leaves(list(tree)):
        if isinstance(leaf, Tensor) and not (leaf.numel() and leaf.data_ptr() in seen):
            seen.add(leaf.data_ptr())
            yield SavedTensor(column, part, format_of(leaf.dtype), leaf.numel(), leaf.nbytes)


def _open_folder(path: Path) -> SavedCheckpoint:
    rest, index = load(path / META), read_index(path)
    rest.pop("optimizer_states", None)
    stored = {k: m for k, m in index.state_dict_metadata.items() if isinstance(m, TensorStorageMetadata)}
    by_megatron = _HISTORIES in rest
    if not by_megatron and not any(key.startswith("model.") for key in stored):
        raise ValueError(
            f"{path} was written by neither lowprec_sharded nor lowprec_megatron. A folder of another of Lightning's "
            "strategies is made one file by: python -m lightning.pytorch.utilities.consolidate_checkpoint"
        )
    tensors = []
    for key, meta in stored.items():
        column, part = _of_megatron(key) if by_megatron else _of_sharded(key)
        dtype, count = meta.properties.dtype, meta.size.numel()
        tensors.append(SavedTensor(column, part, format_of(dtype), count, count * dtype.itemsize))
    state = {**_state_in(rest), **(_state_of_megatron(path, rest) if by_megatron else {})}
    size = sum(file.stat().st_size for file in path.iterdir() if file.is_file())
    return SavedCheckpoint(path, MEGATRON if by_megatron else SHARDED, tuple(tensors), rest, state, size)


def _of_sharded(key: str) -> tuple[str, str]:
    kind, _, name = key.partition(".")
    if kind == "optimizer":  # optimizer.INDEX.PARAMETER.NAME
        return STATES, _part(name.rpartition(".")[2])
    return {"model": WEIGHT, "partial": GRADIENT}[kind], ""


def _of_megatron(key: str) -> tuple[str, str]:
    found = _OF_OPTIMIZER.fullmatch(key)
    name = "" if found is None else found[1] or found[2]
    if not name:
        return WEIGHT, ""
    return (MASTER, "") if name == "param" else (STATES, _part(name))


def _part(name: str) -> str:
    return name if name in MOMENTS else "other"


def _state_of_megatron(path: Path, rest: dict[str, Any]) -> dict[str, Any]:
    """The histories and the loss scale of a folder of MegatronStrategy, under the plugin's keys."""
    histories = rest[_HISTORIES]
    names = {"own": "fp8", "te": "te", "speed": "speed"}
    state = {names[key]: value for key, value in histories.items()}
    common = path / "common.pt"
    if common.exists():
        check_regular(common)
        saved = load(common).get("optimizer", {})
        state |= {"loss_scale": saved["loss_scale"]} if "loss_scale" in saved else {}
    return state

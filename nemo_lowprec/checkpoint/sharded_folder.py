"""Checkpoints of a sharded run: a folder, to which every process writes its shards, or one file as of any other run.

A folder holds tensors in the form of ``torch.distributed.checkpoint``, and the rest in ``meta.pt``. A folder and a file
hold the values of the shards, under the model's own names and the optimizer's own numbers, so that both open at any
level on any number of processes.
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from nemo_lowprec.checkpoint.partial_gradients import partial_gradients
from nemo_lowprec.checkpoint.torch_zip import load
from nemo_lowprec.checkpoint.writing import (
    NotWrittenError,
    clear,
    part_of,
    put_in_place,
    start_part,
    system_error,
    writing,
)
from nemo_lowprec.comm import raise_together
from nemo_lowprec.formats import FP16, compute_amax
from nemo_lowprec.tensors import BlockShard, HalfShard
from nemo_lowprec.tensors.dtensor import as_dtensor_like, is_sharded, local_rows, local_shard

# Functions import torch.distributed.checkpoint, which takes as long as half of a level's own files, and ``dcp_folder``,
# which imports torch.distributed.checkpoint: a run without folders needs neither.
if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

META = "meta.pt"
# Prefixes of the keys of weights and of an unfinished step's gradients; the other keys belong to optimizer states.
_MODEL, _PARTIAL = "model.", "partial."
_READ_AT_ONCE = 1 << 30  # bytes; a read goes through the whole index, so a read of each tensor would be slow


def is_folder(path: Path) -> bool:
    """Whether ``path`` is a complete sharded checkpoint."""
    return path.is_dir() and (path / ".metadata").is_file() and (path / META).is_file()


def in_full(tree: Any) -> Any:
    """A copy of nested dicts and lists, with whole tensors on the CPU for sharded tensors; called on all processes."""
    if isinstance(tree, dict):
        return {k: in_full(v) for k, v in tree.items()}
    if isinstance(tree, (list, tuple)):
        return type(tree)(in_full(v) for v in tree)
    return tree.full_tensor().cpu() if is_sharded(tree) else tree


def begin_sharded(checkpoint: dict[str, Any], path: Path, copied: bool = False) -> Callable[..., None]:
    """``begin_folder`` for a checkpoint as Lightning dumps it.

    Args:
        checkpoint: loses its weights, optimizer states and partial gradients.
        path: of the folder.
        copied: whether tensors are copied to the CPU's memory, as training goes on while the folder is written.
    """
    states = checkpoint.pop("optimizer_states", [])
    tensors = {f"{_MODEL}{name}": value for name, value in checkpoint.pop("state_dict").items()}
    rest = []
    for i, state in enumerate(states):
        plain: dict[int, dict[str, Any]] = {}
        for key, values in state["state"].items():
            for name, value in values.items():
                if isinstance(value, Tensor):
                    tensors[f"optimizer.{i}.{key}.{name}"] = value
                else:
                    plain.setdefault(key, {})[name] = value
        rest.append({"state": plain, "param_groups": state["param_groups"]})
    gradients = partial_gradients(checkpoint)
    tensors |= {f"{_PARTIAL}{name}": value for name, value in gradients.items()}
    gradients.clear()
    for key, value in tensors.items():
        if copied and isinstance(value, Tensor):
            tensors[key] = as_dtensor_like(local_shard(value.detach()).to("cpu", copy=True), value)

    def write(part: Path, group: dist.ProcessGroup | None) -> None:  # the first process returns when all have written
        import torch.distributed.checkpoint as dcp

        from nemo_lowprec.checkpoint.dcp_folder import FolderWriter

        dcp.save(tensors, storage_writer=FolderWriter(part, sync_files=True), process_group=group)

    return begin_folder(path, {**checkpoint, "optimizer_states": rest}, write)


def begin_folder(
    path: Path, rest: dict[str, Any], write: Callable[[Path, dist.ProcessGroup | None], None]
) -> Callable[..., None]:
    """Make the folder beside ``path``, on all processes. Returns the function that completes and renames the folder.

    The function takes the processes that call it, a group (None for all). Both functions raise
    NotWrittenError on all processes, and remove the folder beside ``path`` before.

    Args:
        path: of the checkpoint.
        rest: the contents of ``meta.pt``, serialized at once.
        write: writes the tensors of all processes into the folder.
    """
    part, serialized = part_of(path), io.BytesIO()
    torch.save(rest, serialized)

    def complete() -> None:
        from nemo_lowprec.checkpoint.dcp_folder import write_checksums

        (part / META).write_bytes(serialized.getvalue())
        write_checksums(part)
        put_in_place(path)

    def finish(group: dist.ProcessGroup | None = None) -> None:
        with _writing_folder(path, group):
            write(part, group)
            on_first(complete, group)

    with _writing_folder(path):
        on_first(lambda: start_part(path))
    return finish


@contextmanager
def _writing_folder(path: Path, group: dist.ProcessGroup | None = None) -> Iterator[None]:
    """For a block of all processes that writes the folder beside ``path``: an error removes this folder.

    Raises:
        NotWrittenError: on all processes, naming ``path`` and the cause.
    """
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        with writing(path):
            try:
                yield
            except (RuntimeError, CheckpointException) as error:
                if system_error(error) is None:
                    # Megatron-core writes in other processes, whose errors are lost. The first process may have removed
                    # the folder already; its parent is on the same disk.
                    probe(path.parent)
                raise
    except NotWrittenError:
        if dist.get_rank(group) == 0:  # no process writes any more: all have this error
            clear(part_of(path))
        raise


def probe(folder: Path) -> None:
    """Write a megabyte to ``folder``, and remove it again: OSError where the disk is full or closed."""
    file = folder / f".probe.{os.getpid()}"
    try:
        file.write_bytes(bytes(1 << 20))
    finally:
        file.unlink(missing_ok=True)


def on_first(work: Callable[[], None], group: dist.ProcessGroup | None = None) -> None:
    """Run ``work`` on the first process; the other processes wait. An OSError of ``work`` is raised on all of them."""
    error: OSError | None = None
    if dist.get_rank() == 0:
        try:
            work()
        except OSError as found:
            error = found
    raise_together(error, group)


def read_folder(path: Path, model: nn.Module, optimizers: list[Optimizer]) -> dict[str, Any]:
    """A checkpoint as Lightning dumps it, with each process's shards; called on all processes.

    Raises:
        ValueError: on all processes, if the folder is damaged or holds an object that may run code.
    """
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    from nemo_lowprec.checkpoint.dcp_folder import CheckedReader, read_tensors

    problem: ValueError | None = None
    try:
        checkpoint: dict[str, Any] = load(path / META)
        reader = CheckedReader(path)
    except ValueError as error:
        problem = error
    raise_together(problem)
    found = {k: m for k, m in reader.index.state_dict_metadata.items() if isinstance(m, TensorStorageMetadata)}
    named = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))
    params = [[p for group in o.param_groups for p in group["params"]] for o in optimizers]
    checkpoint["state_dict"], gradients = {}, partial_gradients(checkpoint)
    tensors: dict[str, Tensor] = {}
    places: dict[str, tuple[dict[str, Any], str]] = {}
    for key, meta in found.items():
        kind, _, name = key.partition(".")
        if kind == "optimizer":
            index, number, name = name.split(".", 2)
            like = params[int(index)][int(number)] if int(index) < len(params) else None
            place = checkpoint["optimizer_states"][int(index)]["state"].setdefault(int(number), {})
        elif kind == "partial" and not optimizers:
            continue
        else:
            like, place = named.get(name), checkpoint["state_dict"] if kind == "model" else gradients
        tensors[key], places[key] = _empty(meta, like), (place, name)
    read_tensors(reader, tensors)
    for key, (place, name) in places.items():
        place[name] = tensors[key]
    return checkpoint


def open_folder(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """The checkpoint's ``meta.pt``, and the names of its weights for ``read_weights``; needs no process group.

    Returns:
        the checkpoint without weights and optimizer states; and for each name of the model's ``state_dict`` a tensor
        of the meta device (shape and dtype), or None for a value that is no tensor.

    Raises:
        ValueError: a file is missing, cut short or damaged.
    """
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    from nemo_lowprec.checkpoint.dcp_folder import read_index

    checkpoint: dict[str, Any] = load(path / META)
    checkpoint.pop("optimizer_states", None)
    return checkpoint, {
        key.removeprefix(_MODEL): torch.empty(meta.size, dtype=meta.properties.dtype, device="meta")
        if isinstance(meta, TensorStorageMetadata) else None
        for key, meta in read_index(path).state_dict_metadata.items() if key.startswith(_MODEL)
    }  # fmt: skip


def read_weights(path: Path, weights: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Whole weights by name, about a gigabyte at a time, without the optimizer states.

    Args:
        path: of the folder.
        weights: names, shapes and dtypes, from ``open_folder``; the order is kept.
    """
    from nemo_lowprec.checkpoint.dcp_folder import CheckedReader, read_tensors

    batch: dict[str, Tensor] = {}
    names = list(weights)
    for i, name in enumerate(names):
        batch[name] = torch.empty_like(weights[name], device="cpu")
        if i + 1 == len(names) or sum(t.nbytes for t in batch.values()) >= _READ_AT_ONCE:
            tensors = {_MODEL + n: t for n, t in batch.items()}
            read_tensors(CheckedReader(path), tensors, alone=True)
            batch.clear()
            while tensors:
                key = next(iter(tensors))
                yield key.removeprefix(_MODEL), tensors.pop(key)


def _empty(meta: TensorStorageMetadata, like: Any) -> Tensor:
    """Memory to read a tensor into, sharded as the parameter ``like`` if it has the shape of ``like``."""
    if like is not None and is_sharded(like) and tuple(like.shape) == tuple(meta.size):
        return as_dtensor_like(
            torch.empty(local_shard(like).shape, dtype=meta.properties.dtype, device=like.device), like
        )
    return torch.empty(meta.size, dtype=meta.properties.dtype)


def restore(checkpoint: dict[str, Any], model: nn.Module, optimizers: list[Optimizer], strict: bool) -> None:
    """Load the weights and optimizer states of a checkpoint, whole or sharded, into the model and the optimizers.

    Raises:
        RuntimeError: on all processes, before anything is changed: parameters or buffers that the model and the
            checkpoint do not share, where ``strict``; of another shape; or with values that the model cannot keep.
    """
    saved = checkpoint["state_dict"]
    own = _entries(model)
    missing, unexpected = sorted(own.keys() - saved.keys()), sorted(saved.keys() - own.keys())
    if strict and (missing or unexpected):
        raise RuntimeError(f"The checkpoint and the model differ. Missing: {missing}; unexpected: {unexpected}.")
    there = {name: tensor for name, tensor in own.items() if name in saved}
    problems = (_problem(name, saved[name], tensor) for name, tensor in there.items())
    raise_together(next((RuntimeError(problem) for problem in problems if problem), None))
    with torch.no_grad():
        for name, tensor in there.items():
            local_shard(tensor).copy_(local_rows(saved[name], tensor))
    for optimizer, state in zip(optimizers, checkpoint.get("optimizer_states", []), strict=False):
        params = [p for group in optimizer.param_groups for p in group["params"]]
        states = {
            key: {
                name: _as_own(value, params[int(key)]) if isinstance(value, Tensor) else value
                for name, value in values.items()
            }
            for key, values in state["state"].items()
        }
        optimizer.load_state_dict({"state": states, "param_groups": state["param_groups"]})


def _problem(name: str, value: Any, own: Any) -> str | None:
    """Why ``value`` cannot be loaded into ``own``; None if it can."""
    if tuple(value.shape) != tuple(own.shape):
        return f"{name} is {tuple(value.shape)} in the checkpoint and {tuple(own.shape)} here."
    if isinstance(local_shard(own), (HalfShard, BlockShard)):
        rows = local_rows(value, own).detach()
        if rows.numel() and float(compute_amax(rows)) > FP16.max:
            return f"{name} has values beyond {FP16.max:.0f}, the largest of FP16, in which it is kept."
    return None


def _as_own(value: Tensor, param: Any) -> Tensor:
    """An optimizer state, sharded as its parameter ``param`` if it has the parameter's shape."""
    if is_sharded(value) or not is_sharded(param) or value.shape != param.shape:
        return value
    return as_dtensor_like(local_rows(value, param).to(param.device), param)


def _entries(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and persistent buffers by name, as the model's ``state_dict`` holds them."""
    tensors = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))
    return {name: tensors[name] for name in model.state_dict() if name in tensors}

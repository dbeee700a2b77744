"""A folder of ``torch.distributed.checkpoint``: a reader that runs no code of a file and loads no damaged tensor.

``.metadata``, the index, is a pickle of the place of each tensor. It is opened with the few classes of an index, and
its checksum lies in ``checksums.json``. A ``.distcp`` file holds, for each tensor, a zip with checksums.
"""

from __future__ import annotations

import io
import json
import pickle
import warnings
import zlib
from collections.abc import Iterable
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, MetadataIndex, StorageMeta
from torch.futures import Future
from typing_extensions import override

from nemo_lowprec.checkpoint.torch_zip import check_regular, check_zip, load, reading
from nemo_lowprec.checkpoint.writing import system_error
from nemo_lowprec.comm import raise_together
from nemo_lowprec.compat.checkpoint import StorageInfo

INDEX = ".metadata"
_CHECKSUMS = "checksums.json"
_PIECE = 1 << 24  # bytes that are read at once
_SUMMED = (INDEX, "metadata.json")  # files without checksums of their own; the second is Megatron-core's
_METADATA = "torch.distributed.checkpoint.metadata"
_PLANNER = "torch.distributed.checkpoint.planner"
_CLASSES = {
    *((_METADATA, name) for name in ("BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex",
                                     "StorageMeta", "TensorProperties", "TensorStorageMetadata")),
    *((_PLANNER, name) for name in ("BytesIOWriteData", "SavePlan", "TensorWriteData", "WriteItem")),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.distributed.checkpoint.filesystem", "_StoragePrefix"),
}  # fmt: skip
_FUNCTIONS = {
    (_METADATA, "_MEM_FORMAT_ENCODING"),
    (_PLANNER, "WriteItemType"),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("collections", "OrderedDict"),
}
_PATHS = {"PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath", "Path"}


def _made_by(kind: Any) -> type:
    """A new class that makes objects of ``kind``: a pickle that changes its class leaves ``kind`` as it is."""
    return type("_Made", (), {"__new__": lambda cls, *args: object.__new__(kind)})


class _ForeignError(Exception):
    """A class or function that no index needs."""


class _Index(pickle.Unpickler):
    """Opens ``.metadata`` with the classes of an index only."""

    @override
    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if module.partition(".")[0] == "pathlib" and name in _PATHS:
            return lambda *parts: "/".join(map(str, parts))  # the folder at the time of writing, which nobody reads
        if (module, name) in _FUNCTIONS:
            found = getattr(import_module(module), name)
            return lambda *args: found(*args)
        if (module, name) in _CLASSES:
            return _made_by(getattr(import_module(module), name))
        raise _ForeignError(f"{module}.{name}")


def read_index(folder: Path) -> Metadata:
    """The index of ``folder``: where each tensor lies.

    Raises:
        ValueError: the index is damaged, or holds an object whose opening might run code; or a file of the folder is
            missing or cut short.
    """
    path = folder / INDEX
    check_regular(path)
    check_sums(folder)
    try:
        with path.open("rb") as file:
            index = _Index(file).load()
        ends: dict[str, int] = {}
        for info in index.storage_data.values():
            if isinstance(info, StorageInfo):
                ends[info.relative_path] = max(ends.get(info.relative_path, 0), info.offset + info.length)
        if not isinstance(index, Metadata) or not isinstance(index.state_dict_metadata, dict):
            raise TypeError(f"a {type(index).__name__}")
        if any(Path(name).name != name for name in ends):
            raise ValueError("files of other folders")
    except _ForeignError as error:
        raise ValueError(
            f"{path} holds {error}, which is no part of a checkpoint's index, and opening it might run code: it is "
            "damaged, or somebody's trap. Take another checkpoint."
        ) from error
    except Exception as error:  # any, for bytes that are no index
        raise ValueError(f"{path} is damaged: it is no index of a checkpoint ({error}).") from error
    for name, end in sorted(ends.items()):
        try:
            check_regular(folder / name)
        except ValueError as error:
            raise ValueError(f"{folder} is incomplete or damaged: {error}") from error
        if (folder / name).stat().st_size < end:
            raise ValueError(f"{folder} is incomplete: {name} is cut short. Copy it again, or take another.")
    return index


def _sum(path: Path) -> str:
    total = 0
    with path.open("rb") as file:
        while piece := file.read(_PIECE):
            total = zlib.crc32(piece, total)
    return f"{total:08x}"


def write_checksums(folder: Path, names: Iterable[str] = _SUMMED) -> None:
    """Write ``checksums.json``: the CRC-32 of files in ``folder`` whose own format has no checksum.

    Args:
        folder: with complete files.
        names: of the files; by default those of a checkpoint. A file that does not exist is left out.
    """
    sums = {name: _sum(folder / name) for name in names if (folder / name).is_file()}
    (folder / _CHECKSUMS).write_text(json.dumps(sums))


def check_sums(folder: Path, names: Iterable[str] = _SUMMED) -> None:
    """Compare files with ``checksums.json``, which folders of earlier versions and of other programs do not have.

    Raises:
        ValueError: a file has changed since it was written.
    """
    path = folder / _CHECKSUMS
    if not path.exists():
        return
    check_regular(path)
    try:
        saved = {str(name): str(value) for name, value in json.loads(path.read_text()).items()}
    except (ValueError, AttributeError) as error:
        raise ValueError(f"{path} is damaged: it is no list of checksums.") from error
    for name in names:
        if name in saved:
            check_regular(folder / name)
            if _sum(folder / name) != saved[name]:
                raise ValueError(
                    f"{folder / name} is damaged: it is not what was written (CRC-32). Copy it again, or take another "
                    "checkpoint."
                )


def _check_item(folder: Path, index: MetadataIndex, info: StorageInfo, is_object: bool = False) -> None:
    """Compare the checksums of a tensor or an object, read whole; open an object, which must hold plain values."""
    path = folder / info.relative_path
    with path.open("rb") as file:
        file.seek(info.offset)
        zipped = io.BytesIO(file.read(info.length))
    check_zip(zipped, path, index.fqn)
    if is_object:
        zipped.seek(0)
        with reading(path):
            torch.load(zipped, map_location="cpu", weights_only=True)


class CheckedReader(dcp.FileSystemReader):
    """torch's reader of a folder, with a comparison of each tensor's checksums before the tensor is read.

    Raises:
        ValueError: the folder's index is damaged, or holds an object that may run code.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.folder = folder
        self.index = read_index(folder)
        self.index.storage_meta = self.index.storage_meta or StorageMeta()

    @override
    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self.index

    @override
    def read_data(self, plan: Any, planner: Any) -> Future[None]:
        for index in dict.fromkeys(item.storage_index for item in plan.items):
            _check_item(self.folder, index, self.storage_data[index])
        with reading(self.folder):
            return super().read_data(plan, planner)


class FolderWriter(dcp.FileSystemWriter):
    """torch's writer of a folder; the other processes get the system's error, and not torch's."""

    @override
    def write_data(self, plan: Any, planner: Any) -> Any:
        try:
            return super().write_data(plan, planner)
        except RuntimeError as error:
            found = system_error(error)  # in the context of torch's error, which pickling loses
            if found is None:
                raise
            raise OSError(found.errno, found.strerror) from error


def check_folder(folder: Path) -> None:
    """Compare all checksums, and refuse objects that may run code: for Megatron-core's reader, which does neither.

    Called on all processes; each process takes its part of the tensors.

    Raises:
        ValueError: on all processes, naming the file and the tensor.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    error: Exception | None = None
    try:
        index = read_index(folder)
        if rank == 0 and (folder / "common.pt").exists():
            load(folder / "common.pt")
        for i, (item, info) in enumerate(index.storage_data.items()):
            if i % world == rank:
                is_object = isinstance(index.state_dict_metadata.get(item.fqn), BytesStorageMetadata)
                _check_item(folder, item, info, is_object)
    except ValueError as found:
        error = found
    raise_together(error)


def read_tensors(reader: CheckedReader, tensors: dict[str, Tensor], alone: bool = False) -> None:
    """Read the values of ``tensors`` by key, on all processes together.

    Args:
        reader: of the folder.
        tensors: memory to read into; a DTensor gets the rows of its process.
        alone: whether this process reads without the others and without a process group.

    Raises:
        ValueError: the first error of all processes, in one sentence; torch raises all of them, in many lines.
    """
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is (disabled|unavailable)")
            dcp.load(tensors, storage_reader=reader, no_dist=alone)
    except CheckpointException as error:
        found = [failure[0] for failure in error.failures.values()]
        ours = [e for e in found if isinstance(e, ValueError)]
        if ours:
            raise ValueError(str(ours[0])) from error
        raise ValueError(f"{reader.folder} cannot be read: {(str(found[0]).splitlines() or [''])[0]}") from error

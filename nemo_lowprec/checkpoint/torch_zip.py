"""Reads a file of ``torch.save``, a zip with a CRC-32 of each member, and compares the CRC-32: torch never does.

A ``.distcp`` file of a sharded folder holds such a zip for each tensor, one after another. Cost: a pass of
``zlib.crc32`` over the bytes, 2.7 GB/s a thread.
"""

from __future__ import annotations

import io
import pickle
import stat
import zipfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, BinaryIO

import torch

_PIECE = 1 << 24  # bytes that are read at once
_THREADS = 4
_TAKE_ANOTHER = "Copy it again, or take another one."


def check_regular(path: Path) -> None:
    """Check that ``path`` is a file that can be read, without waiting for a pipe.

    Raises:
        ValueError: ``path`` is missing, a folder, a pipe, a device or empty, or this user may not read the file.
    """
    try:
        found = path.stat()
        kind = stat.S_IFMT(found.st_mode)
        if kind == stat.S_IFDIR:
            raise ValueError(
                f"{path} is a folder, and one file is to be read here. What lowprec_sharded or lowprec_megatron wrote "
                "is read by these strategies."
            )
        if kind != stat.S_IFREG:
            raise ValueError(f"{path} is a pipe or a device, and no checkpoint. Pass a file.")
        with path.open("rb"):
            pass
    except FileNotFoundError:
        raise ValueError(f"{path} does not exist.") from None
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}.") from error
    if not found.st_size:
        raise ValueError(f"{path} is empty, and no complete checkpoint. {_TAKE_ANOTHER}")


class _Node(dict[Any, Any]):
    """Replaces every object in a pickle: holds the object's arguments, state and items, and runs no code."""

    parts: list[Any]

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        node = super().__new__(cls)
        node.parts = [*args]
        return node

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()

    def __setstate__(self, state: Any) -> None:
        self.parts.append(state)

    def append(self, value: Any) -> None:
        self.parts.append(value)

    def extend(self, values: Any) -> None:
        self.parts.extend(values)

    __hash__ = object.__hash__  # type: ignore[assignment]


class _Storage(str):
    """The number of a storage, which is the name of the storage's member in the zip."""


class _Structure(pickle.Unpickler):
    """Reads the storages that a pickle of torch refers to, and loads no class or function that the pickle names."""

    def find_class(self, module: str, name: str) -> Any:
        return type(name, (_Node,), {})  # a new class each time, as a pickle may change a class

    def persistent_load(self, pid: Any) -> Any:
        return _Storage(pid[2])


def _storages(tree: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """(number of a storage, dotted name of a tensor in it) for each tensor of a tree."""
    if isinstance(tree, _Storage):
        yield str(tree), path.lstrip(".")
    elif isinstance(tree, dict):
        yield from _storages(tuple(getattr(tree, "parts", ())), path)
        for key, value in tree.items():
            yield from _storages(value, f"{path}.{key}")
    elif isinstance(tree, (list, tuple)):
        for i, part in enumerate(tree):  # a tuple holds the arguments of an object
            yield from _storages(part, f"{path}.{i}" if isinstance(tree, list) else path)


def _is_intact(zipped: zipfile.ZipFile, member: zipfile.ZipInfo) -> bool:
    if member.compress_type != zipfile.ZIP_STORED or member.compress_size != member.file_size:
        return False
    try:
        with zipped.open(member) as file:
            while file.read(_PIECE):  # zipfile compares the CRC-32 at the end
                pass
    except Exception:  # zipfile raises many kinds for damaged bytes
        return False
    return True


def check_zip(file: BinaryIO, path: Path, name: str = "", only: str | None = None) -> None:
    """Compare the bytes of a zip of ``torch.save`` with the zip's checksums.

    A zip without checksums (``torch.serialization.set_crc32_options(False)``) need only be complete.

    Args:
        file: holds the zip and nothing else.
        path: of the file on the disk, for the message.
        name: of the tensor, for a zip of one tensor.
        only: a key of the saved tree, whose tensors are compared; None for all tensors.

    Raises:
        ValueError: the zip is not complete, or its bytes have changed; naming the tensor.
    """
    of = f"{name} in {path}" if name else f"{path}"
    try:
        zipped = zipfile.ZipFile(file)
        members = {info.filename.partition("/")[2]: info for info in zipped.infolist()}
    except Exception as error:  # zipfile raises many kinds for damaged bytes
        # The directory of a zip file is written last.
        raise ValueError(
            f"{of} is no complete checkpoint: its writing was cut short, or it is another kind of file, or damaged. "
            f"{_TAKE_ANOTHER}"
        ) from error
    pickled = members.get("data.pkl")
    if pickled is None:
        raise ValueError(f"{of} is no checkpoint: torch did not write it. {_TAKE_ANOTHER}")
    has_checksums = any(info.CRC for info in members.values())
    if has_checksums and not _is_intact(zipped, pickled):
        raise ValueError(
            f"{of} is damaged: its data.pkl, which says what it holds, is not what was written. {_TAKE_ANOTHER}"
        )
    if not has_checksums:
        del pickled.CRC  # zipfile compares none then
    names = _names(zipped, pickled)
    wanted = [
        member for member in members
        if only is None or not member.startswith("data/") or
        any(n == only or n.startswith(f"{only}.") for n in names.get(member, [only]))
    ]  # fmt: skip
    missing = [member for member in names if member not in members]
    if missing:
        raise ValueError(
            f"{of} is damaged: the values of {name or _say(names, missing[0])} are missing. {_TAKE_ANOTHER}"
        )
    if not has_checksums:
        return
    # zlib releases the interpreter's lock; threads for a small tensor would cost more time than they save.
    is_large = sum(members[member].file_size for member in wanted) > _PIECE
    with ThreadPoolExecutor(_THREADS) if is_large else nullcontext() as threads:
        each = threads.map if threads is not None else map
        intact = list(each(lambda member: _is_intact(zipped, members[member]), wanted))
    bad = [member for member, good in zip(wanted, intact, strict=True) if not good]
    if bad:
        more = f" and {len(bad) - 1} more" if len(bad) > 1 else ""
        what = "its values are" if name else f"{_say(names, bad[0])}{more} is"
        raise ValueError(f"{of} is damaged: {what} not what was written (CRC-32). {_TAKE_ANOTHER}")


def _names(zipped: zipfile.ZipFile, pickled: zipfile.ZipInfo) -> dict[str, list[str]]:
    """Names of the tensors in each member."""
    found: dict[str, list[str]] = {}
    try:
        for number, name in _storages(_Structure(io.BytesIO(zipped.read(pickled))).load()):
            found.setdefault(f"data/{number}", []).append(name)
    except Exception:  # the pickle is damaged; ``load`` raises the error
        return {}
    return found


def _say(names: dict[str, list[str]], member: str) -> str:
    return names.get(member, [f"its member {member}"])[0] or f"its member {member}"


def check_file(path: Path, only: str | None = None) -> None:
    """``check_zip`` of a whole file, after ``check_regular``."""
    check_regular(path)
    with path.open("rb") as file:
        check_zip(file, path, only=only)


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """For a block that opens ``path`` after ``check_file``: torch's errors become one sentence.

    Raises:
        ValueError: the file holds objects whose opening may run code, or torch did not write the file.
    """
    try:
        yield
    except pickle.UnpicklingError as error:
        _, is_global, found = str(error).partition("GLOBAL ")
        if is_global:
            raise ValueError(
                f"{path} holds {found.split()[0]} beside tensors and plain values, and opening it may run code. If you "
                "trust it, allow that first with torch.serialization.add_safe_globals."
            ) from error
        raise ValueError(f"{path} is damaged, or holds objects of Python, and opening it may run code.") from error
    except (RuntimeError, EOFError, LookupError, AttributeError, TypeError, UnicodeDecodeError, OSError) as error:
        first_line = (str(error).splitlines() or [type(error).__name__])[0]
        raise ValueError(f"{path} is damaged, or another kind of file: {first_line}") from error


def load(path: Path, only: str | None = None, mmap: bool = False) -> Any:
    """Compare the checksums of a file of ``torch.save``, and open the file on the CPU; no code in the file is run.

    Args:
        path: the file.
        only: see ``check_zip``.
        mmap: whether tensors are mapped into memory, and read at their first use.

    Raises:
        ValueError: one sentence about the damage, the kind of file, or the foreign object.
    """
    check_file(path, only)
    with reading(path):
        return torch.load(path, map_location="cpu", mmap=mmap, weights_only=True)


def load_lightning(path: Path, only: str | None = None, mmap: bool = False) -> dict[str, Any]:
    """``load`` for a checkpoint of a LightningModule.

    Raises:
        ValueError: as ``load``; or the file has no weights by name.
    """
    checkpoint = load(path, only, mmap)
    if not isinstance(checkpoint, dict) or not isinstance(checkpoint.get("state_dict"), dict):
        raise ValueError(f"{path} is no checkpoint of a LightningModule: it has no 'state_dict'.")
    return checkpoint

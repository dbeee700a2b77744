"""What can be wrong with a checkpoint on the disk."""

from __future__ import annotations

import io
import os
import pickle
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path

import torch

__all__ = ["BIT_FLIPS", "HARMS", "Trap", "copied", "flip", "flip_in_tensor", "member_at", "sprung"]


class Trap:
    """Opened by ``pickle``, it writes the file ``sprung(folder)``."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self):
        return os.system, (f"touch {sprung(self.folder)}",)


def sprung(folder: Path) -> Path:
    return folder / "the-trap-was-sprung"


def member_at(data: bytes | bytearray, info: zipfile.ZipInfo) -> int:
    """Where a member's bytes begin in a zip file."""
    at = info.header_offset
    return (
        at + 30 + int.from_bytes(data[at + 26 : at + 28], "little") + int.from_bytes(data[at + 28 : at + 30], "little")
    )


def flip(path: Path, at: int, bit: int = 4) -> None:
    """Flip one bit of a file."""
    data = bytearray(path.read_bytes())
    data[at] ^= 1 << bit
    path.write_bytes(data)


def flip_in_tensor(folder: Path, name: str) -> None:
    """Flip one bit in the last byte of the tensors of a folder whose names hold ``name``."""
    for item, info in pickle.loads((folder / ".metadata").read_bytes()).storage_data.items():
        if name in item.fqn:
            path = folder / info.relative_path
            data = path.read_bytes()[info.offset : info.offset + info.length]
            with zipfile.ZipFile(io.BytesIO(data)) as file:
                found = next(i for i in file.infolist() if i.filename.endswith("/data/0"))
            flip(path, info.offset + member_at(data, found) + found.file_size - 1)


def _members(path: Path) -> dict[str, zipfile.ZipInfo]:
    with zipfile.ZipFile(path) as file:
        return {info.filename.partition("/")[2]: info for info in file.infolist()}


def _first(path: Path) -> zipfile.ZipInfo:
    """The first weight."""
    return _members(path)["data/0"]


def _flip_in_tensor(path: Path) -> None:
    info = _first(path)
    flip(path, member_at(path.read_bytes(), info) + info.file_size // 2)


def _zero_half(path: Path) -> None:
    info, data = _first(path), bytearray(path.read_bytes())
    start = member_at(data, info)
    data[start : start + info.file_size // 2] = bytes(info.file_size // 2)
    path.write_bytes(data)


def _flip_in_pickle(path: Path) -> None:
    """The last digit of a number that is no tensor."""
    info, data = _members(path)["data.pkl"], bytearray(path.read_bytes())
    at = data.index(b"global_step", member_at(data, info)) + len(b"global_step")
    while data[at : at + 1] != b"K":  # one byte, unsigned
        at += 1
    flip(path, at + 1, 0)


def _rewrite(path: Path, change: Callable[[str, bytes], bytes | None]) -> None:
    with zipfile.ZipFile(path) as file:
        entries = [(info.filename, file.read(info)) for info in file.infolist()]
    with zipfile.ZipFile(path, "w") as file:
        for name, data in entries:
            kept = change(name.partition("/")[2], data)
            if kept is not None:
                file.writestr(name, kept)


def _trap(path: Path, protocol: int) -> None:
    code = pickle.dumps(Trap(path.parent), protocol)
    _rewrite(path, lambda name, data: code if name == "data.pkl" else data)


def _other_kind(make: Callable[[Path], object]) -> Callable[[Path], None]:
    def harm(path: Path) -> None:
        path.unlink()
        make(path)

    return harm


BIT_FLIPS = {
    "a bit of a tensor": (_flip_in_tensor, r"is damaged: state_dict\.\S+ is not what was written"),
    "half a tensor zeroed": (_zero_half, r"is damaged: state_dict\.\S+ is not what was written"),
    "a bit of data.pkl": (_flip_in_pickle, "is damaged: its data.pkl"),
}
HARMS = BIT_FLIPS | {
    "cut short": (lambda path: os.truncate(path, path.stat().st_size // 2), "is no complete checkpoint"),
    "empty": (lambda path: path.write_bytes(b""), "is empty"),
    "text": (lambda path: path.write_text("hello " * 1000), "is no complete checkpoint"),
    "a member missing": (
        lambda path: _rewrite(path, lambda name, data: None if name == "data/1" else data),
        r"the values of \S+ are missing",
    ),
    "a zip of others": (
        lambda path: _rewrite(path, lambda name, data: None if name == "data.pkl" else data),
        "torch did not write it",
    ),
    "no pickle": (lambda path: _rewrite(path, lambda name, data: b"hi" if name == "data.pkl" else data), "is damaged"),
    **{
        f"code, protocol {protocol}": (lambda path, protocol=protocol: _trap(path, protocol), "opening it may run code")
        for protocol in (2, 4)
    },
    "another object": (lambda path: torch.save([1, 2], path), "no checkpoint of a LightningModule"),
    "a folder": (_other_kind(lambda path: (path.mkdir(), (path / "file").touch())), "is a folder|no complete sharded"),
    "a pipe": (_other_kind(os.mkfifo), "is a pipe or a device"),
    "a device": (_other_kind(lambda path: path.symlink_to("/dev/zero")), "is a pipe or a device"),
    "gone": (_other_kind(lambda path: None), "does not exist"),
    "a link to nothing": (_other_kind(lambda path: path.symlink_to(path.parent / "nothing")), "does not exist"),
}


def copied(source: Path, folder: Path) -> Path:
    """A copy to be harmed."""
    folder.mkdir(parents=True, exist_ok=True)
    return Path(shutil.copy(source, folder / "x.ckpt"))

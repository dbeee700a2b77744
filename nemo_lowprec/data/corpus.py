"""Lists the documents of a corpus in order, and splits them into training and validation documents.

Every choice hashes the name of a document below the source folder with a seed. So a choice is the same on every
machine, and adding or removing other documents does not change a choice.
"""

import hashlib
import json
import os
import sysconfig
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

_NOT_STDLIB = {"site-packages", "dist-packages", "__pycache__"}


@dataclass(frozen=True)
class Document:
    """One text, not yet read; or one file of a source.

    Attributes:
        name: Unique in the corpus: the path below the source, or `shard.jsonl:7` for its line 7 (from 0).
        group: Documents of one group are never split between training and validation. The name of the file; in a
            source that is one .jsonl file, the document's own name.
        size: Bytes on disk, the JSON around a text included.
        path: The file that holds the document.
        offset: Byte at which the document's line of a .jsonl file starts; None: the document is the whole file.
        text_field: Key of the text in that line.
    """

    name: str
    group: str
    size: int
    path: Path
    offset: int | None = None
    text_field: str = "text"

    def read(self) -> str | None:
        """The text, line ends as they are; None for a file that is not UTF-8.

        Raises:
            ValueError: The file cannot be read, or the line is not a JSON object whose `text_field` is a string.
        """
        with _open(self.path) as stream:
            stream.seek(self.offset or 0)
            raw = stream.read(self.size)
        if self.offset is not None:
            return self._parse_line(raw)
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError:
            return None

    def _parse_line(self, raw: bytes) -> str:
        try:
            record = json.loads(raw)
        except ValueError as error:
            raise ValueError(f"{self.name} is not JSON ({error}): correct or remove that line.") from error
        text = record.get(self.text_field) if isinstance(record, dict) else None
        if isinstance(text, str):
            return text
        found = sorted(record) if isinstance(record, dict) else type(record).__name__
        raise ValueError(
            f"{self.name} has no text under {self.text_field!r} (it has {found}): "
            "pass text_field=... with the name of the text's key."
        )


@contextmanager
def _open(path: Path) -> Iterator[BinaryIO]:
    """Open a file of the corpus; a file that cannot be read is a ValueError."""
    try:
        with path.open("rb") as stream:
            yield stream
    except OSError as error:
        raise ValueError(
            f"{path} of the corpus cannot be read ({error.strerror}): make it readable or take it out of the source."
        ) from error


def source_files(source: str | Path | None = None) -> list[Document]:
    """The files of a source, sorted by name; empty and hidden ones are left out.

    Args:
        source: None: the .py files of the running Python's standard library (31 MB in 3.11). A folder: the .jsonl files
            below the folder, or all files where none is a .jsonl file. One .jsonl file.

    Raises:
        ValueError: The source does not exist, has no files, or is one file of another kind.
    """
    if source is None:
        root = Path(sysconfig.get_path("stdlib"))
        files = [file for file in _walk(root, _NOT_STDLIB) if file.name.endswith(".py")]
        if not files:
            raise ValueError(
                f"This Python comes without the sources of its standard library ({root}): "
                "pass source=... with a folder of text files or a .jsonl file."
            )
        return files
    root = Path(source)
    if root.is_file():
        if root.suffix != ".jsonl":
            raise ValueError(
                f"{root} is a single text, and nothing of it could be kept for validation: "
                "pass a folder of text files or a .jsonl file as source."
            )
        file = Document(root.name, root.name, root.stat().st_size, root)
        files = [file] if file.size else []
    elif root.is_dir():
        files = _walk(root, {"__pycache__"})
        files = [file for file in files if file.name.endswith(".jsonl")] or files
    else:
        raise ValueError(f"The source {root} does not exist: pass a folder of text files or a .jsonl file.")
    if not files:
        raise ValueError(f"The source {root} holds no text: pass a folder of text files or a .jsonl file.")
    return files


def _walk(root: Path, skipped: set[str]) -> list[Document]:
    found = []
    for folder, below, names in os.walk(root):
        below[:] = [name for name in below if name not in skipped and not name.startswith(".")]
        for name in names:
            path = Path(folder, name)
            if not name.startswith(".") and path.is_file() and (size := path.stat().st_size):
                below_root = path.relative_to(root).as_posix()
                found.append(Document(below_root, below_root, size, path))
    return sorted(found, key=lambda file: file.name)


def listing_fingerprint(files: Sequence[Document]) -> str:
    """SHA-256 (hex) of the files' names and sizes; contents are not read."""
    listing = "".join(f"{file.name}\0{file.size}\n" for file in files)
    return hashlib.sha256(listing.encode("utf-8", "surrogateescape")).hexdigest()


def list_documents(source: str | Path | None = None, text_field: str = "text") -> list[Document]:
    """All documents of a source (see `source_files`), in the order of the files' names and of the lines in a file.

    `text_field` is the key of the text in the lines of .jsonl files.

    Raises:
        ValueError: As for `source_files`; or a .jsonl file cannot be read or has only blank lines.
    """
    documents: list[Document] = []
    by_line = source is not None and Path(source).is_file()
    for file in source_files(source):
        documents += _list_lines(file, text_field, by_line) if file.name.endswith(".jsonl") else [file]
    if not documents:
        raise ValueError(f"The source {source} has only blank lines: pass one with text in it.")
    return documents


def _list_lines(file: Document, text_field: str, by_line: bool) -> Iterator[Document]:
    offset = 0
    with _open(file.path) as stream:
        for number, line in enumerate(stream):
            if line.strip():
                name = f"{file.name}:{number}"
                yield Document(name, name if by_line else file.name, len(line), file.path, offset, text_field)
            offset += len(line)


def limit_bytes(documents: Sequence[Document], max_bytes: int, seed: int) -> list[Document]:
    """Takes, in hash order, every document that still fits into `max_bytes`; returns the taken ones in given order.

    Raises:
        ValueError: No document fits.
    """
    chosen, total = set(), 0
    for document in sorted(documents, key=lambda d: _hash(f"subset {seed}", d.name)):
        if total + document.size <= max_bytes:
            chosen.add(document.name)
            total += document.size
    if not chosen:
        smallest = min(document.size for document in documents)
        raise ValueError(
            f"max_bytes={max_bytes} is less than the smallest document ({smallest} bytes): pass more, or None for the "
            "whole corpus."
        )
    return [document for document in documents if document.name in chosen]


def split_documents(
    documents: Sequence[Document], validation_fraction: float, seed: int
) -> tuple[list[Document], list[Document]]:
    """Splits documents into training and validation documents, by whole groups, in the given order.

    A group is for validation when its hash, as a number in [0, 1), is below the fraction. So the fraction holds on
    average, over groups and not over bytes.

    Raises:
        ValueError: One side has no documents.
    """
    sides: tuple[list[Document], list[Document]] = ([], [])
    for document in documents:
        is_validation = _hash(f"split {seed}", document.group) < validation_fraction * 2**64
        sides[is_validation].append(document)
    for side, name in zip(sides, ("training", "validation"), strict=True):
        if not side:
            groups = len({document.group for document in documents})
            raise ValueError(
                f"validation_fraction={validation_fraction} with seed={seed} leaves nothing for {name} out of {groups} "
                "separable parts: pass another fraction or seed, a larger max_bytes, or a source of more files."
            )
    return sides


def in_hash_order(documents: Sequence[Document], seed: int) -> list[Document]:
    """The documents in the order of their hashes, which does not depend on the order of the names."""
    return sorted(documents, key=lambda d: _hash(f"order {seed}", d.name))


def _hash(salt: str, name: str) -> int:
    """64 bits of SHA-256 over salt and name."""
    raw = f"{salt}\0{name}".encode("utf-8", "surrogateescape")
    return int.from_bytes(hashlib.sha256(raw).digest()[:8], "big")

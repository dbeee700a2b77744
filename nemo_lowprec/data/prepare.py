"""Prepares a corpus for pretraining: a tokenizer, Megatron's .bin/.idx files, and a record of both.

`prepare_data` writes the folder under another name beside its place and renames the complete folder. So a folder under
the final name is always complete, and an existing folder is never written over.
"""

import json
import logging
import os
import shutil
import sys
import time
import uuid
from collections.abc import Generator, Sequence
from contextlib import closing
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from nemo_lowprec.arguments import checked
from nemo_lowprec.checkpoint.writing import writing
from nemo_lowprec.data.corpus import (
    Document,
    in_hash_order,
    limit_bytes,
    list_documents,
    listing_fingerprint,
    source_files,
    split_documents,
)
from nemo_lowprec.data.indexed import import_megatron, open_indexed
from nemo_lowprec.data.tokenizer import (
    END_OF_DOCUMENT,
    MIN_VOCAB_SIZE,
    Tokenizer,
    check_vocab_size,
    encode_documents,
    load_tokenizer,
    train_tokenizer,
)

log = logging.getLogger(__name__)

_RECORD = "prepared.json"
_FORMAT = 1
DEFAULT_VOCAB_SIZE = 8192
_DEFAULTS: dict[str, Any] = {
    "vocab_size": DEFAULT_VOCAB_SIZE,
    "validation_fraction": 0.02,
    "seed": 0,
    "max_bytes": None,
    "text_field": "text",
    "tokenizer_bytes": 8_000_000,
}


@dataclass(frozen=True)
class PreparedData:
    """A folder of prepared data at `path`; `record` is the contents of its `prepared.json`."""

    path: Path
    record: dict[str, Any]

    @property
    def train_prefix(self) -> str:
        """Path of train.bin and train.idx, without the ending."""
        return str(self.path / "train")

    @property
    def validation_prefix(self) -> str:
        """Path of validation.bin and validation.idx, without the ending."""
        return str(self.path / "validation")

    @property
    def tokenizer_path(self) -> Path:
        """Path of tokenizer.json, which `PreTrainedTokenizerFast(tokenizer_file=...)` of transformers reads."""
        return self.path / "tokenizer.json"

    @property
    def vocab_size(self) -> int:
        """Number of ids of the tokenizer; a small corpus has fewer ids than `prepare_data` was asked for."""
        return int(self.record["vocab_size"])

    @property
    def end_of_document(self) -> int:
        """Id that ends every document."""
        return int(self.record["end_of_document"])

    @property
    def tokens(self) -> dict[str, int]:
        """Tokens of `train` and of `validation`, the ends of documents included."""
        return {split: int(self.record[split]["tokens"]) for split in ("train", "validation")}

    def load_tokenizer(self) -> Tokenizer:
        """The tokenizer, of the `tokenizers` library."""
        return load_tokenizer(self.tokenizer_path)


@checked
def prepare_data(
    out_dir: str | Path,
    source: str | Path | None = None,
    vocab_size: int | None = None,
    validation_fraction: float | None = None,
    seed: int | None = None,
    max_bytes: int | None = None,
    text_field: str | None = None,
    tokenizer_bytes: int | None = None,
) -> PreparedData:
    """Writes `tokenizer.json`, `train.bin/.idx`, `validation.bin/.idx` and `prepared.json`.

    A folder that was prepared from the same files is returned at once; an argument of None then stands for the value
    that the folder was prepared with. The standard library of another Python counts as the same source, so that
    prepared data can be carried to another machine. A source that no longer exists counts as the same if its path is
    the same.

    A killed run leaves a folder `.NAME.*.partial` beside `out_dir`, which may be deleted.

    Args:
        out_dir: Folder to write, which does not exist yet or is empty.
        source: None: the sources of the running Python's standard library. Or a folder of text files, a folder of
            .jsonl files, or one .jsonl file. Files that are not UTF-8 are left out and counted in the record.
        vocab_size: Largest number of ids of the tokenizer, from 257 to 2**24; 8192 for a new folder. A token takes 2
            bytes on disk below 65500 ids, else 4.
        validation_fraction: Fraction of the files (one .jsonl file: of its lines) kept for validation, chosen by the
            hash of their names. In (0, 1); 0.02 for a new folder.
        seed: Changes which files are for validation and which files `max_bytes` takes; 0 for a new folder.
        max_bytes: Bytes of documents to take, in hash order; all for a new folder.
        text_field: Key of the text in .jsonl lines; `text` for a new folder.
        tokenizer_bytes: Bytes of training documents, in hash order, that the tokenizer is trained on; 8,000,000 for a
            new folder.

    Raises:
        ValueError: A bad value; an empty or unreadable source; or `out_dir` holds something else, or data prepared from
            other files or with other arguments.
        NotWrittenError: A full disk, or a folder that may not be written to.
    """
    given = {name: value for name, value in locals().items() if name in _DEFAULTS and value is not None}
    if vocab_size is not None:
        check_vocab_size(vocab_size)
    path = None if source is None else str(source)
    target = Path(os.path.abspath(out_dir))
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        return _reuse(target, path, given)

    arguments: dict[str, Any] = {"source": path, **_DEFAULTS, **given}
    vocab_size, seed, text_field = (arguments[name] for name in ("vocab_size", "seed", "text_field"))
    started = time.perf_counter()
    documents = list_documents(source, text_field)
    if max_bytes is not None:
        documents = limit_bytes(documents, max_bytes, seed)
    train, validation = split_documents(documents, arguments["validation_fraction"], seed)
    partial = target.with_name(f".{target.name}.{uuid.uuid4().hex[:8]}.partial")
    try:
        with writing(target, "; nothing is left of it."):
            partial.mkdir(parents=True)
            tokenizer = _train_tokenizer(in_hash_order(train, seed), vocab_size, arguments["tokenizer_bytes"])
            tokenizer.save(str(partial / "tokenizer.json"))
            record = {
                "format": _FORMAT,
                "arguments": arguments,
                "source_fingerprint": listing_fingerprint(source_files(source)),
                "vocab_size": tokenizer.get_vocab_size(),
                "end_of_document": tokenizer.token_to_id(END_OF_DOCUMENT),
                "train": _write_indexed(partial / "train", tokenizer, train),
                "validation": _write_indexed(partial / "validation", tokenizer, validation),
                "versions": {
                    "python": sys.version.split()[0],
                    "tokenizers": version("tokenizers"),
                    "megatron-core": version("megatron-core"),
                },
            }
            (partial / _RECORD).write_text(json.dumps(record, indent=2) + "\n")
            try:
                partial.rename(target)
            except OSError:
                if not target.is_dir() or not any(target.iterdir()):
                    raise
                # Another process was faster, or the folder was filled meanwhile.
                return _reuse(target, path, given)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    prepared = PreparedData(target, record)
    log.info(
        "Prepared %s in %.1f s: %d training and %d validation tokens, %d ids.",
        target,
        time.perf_counter() - started,
        prepared.tokens["train"],
        prepared.tokens["validation"],
        prepared.vocab_size,
    )
    return prepared


def is_prepared(out_dir: str | Path) -> bool:
    """Whether `open_prepared` opens the folder."""
    try:
        open_prepared(out_dir)
    except ValueError:
        return False
    return True


def open_prepared(out_dir: str | Path) -> PreparedData:
    """Opens a prepared folder, wherever the folder was moved, and whatever its arguments were.

    Raises:
        ValueError: The folder was not written by `prepare_data`, or a file in it is missing or truncated.
    """
    path = Path(os.path.abspath(out_dir))
    try:
        record = json.loads((path / _RECORD).read_text())
        complete = record["format"] == _FORMAT
    except (OSError, ValueError, LookupError, TypeError):
        complete = False
    if not complete:
        raise ValueError(
            f"{path} is not a folder of prepared data (it has no {_RECORD} of format {_FORMAT}): pass one that "
            "prepare_data wrote, or a new one to prepare."
        )
    prepared = PreparedData(path, record)
    if not prepared.tokenizer_path.is_file():
        raise ValueError(f"{prepared.tokenizer_path} is missing: copy it again, or prepare a new folder.")
    ids = prepared.load_tokenizer().get_vocab_size()
    if ids != record.get("vocab_size"):
        raise ValueError(
            f"{prepared.tokenizer_path} has {ids} ids and {path / _RECORD} says {record.get('vocab_size')!r}: it is "
            "not the tokenizer of these data. Copy the folder again, or prepare a new one."
        )
    for split, prefix in (("train", prepared.train_prefix), ("validation", prepared.validation_prefix)):
        data = open_indexed(prefix)  # keeps the memory map of `sequence_lengths` open
        tokens = int(data.sequence_lengths.sum(dtype=np.int64))
        wanted = (record.get(split) or {}).get("tokens")
        if tokens != wanted:
            raise ValueError(
                f"{prefix}.idx has {tokens} tokens and {path / _RECORD} says {wanted!r}: they are not of one folder. "
                "Copy the folder again, or prepare a new one."
            )
    return prepared


def _reuse(target: Path, source: str | None, given: dict[str, Any]) -> PreparedData:
    prepared = open_prepared(target)
    recorded = prepared.record["arguments"]
    other = [
        f"{name} is {recorded.get(name)!r} there and {value!r} now"
        for name, value in given.items()
        if recorded.get(name) != value
    ]
    there = recorded["source"]
    same_files = there == source
    if there is not None and source is not None and Path(source).exists():
        same_files = listing_fingerprint(source_files(source)) == prepared.record["source_fingerprint"]
    if not same_files and there == source:
        other.append(f"the files of {source} have changed since")
    elif not same_files:
        other.append(f"source is {there!r} there and {source!r} now")
    if other:
        raise ValueError(
            f"{target} was prepared otherwise ({'; '.join(other)}): pass a new folder, or use that one with its own "
            "arguments."
        )
    return prepared


def _train_tokenizer(documents: Sequence[Document], vocab_size: int, max_bytes: int) -> Tokenizer:
    taken, total = [], 0
    for document in documents:
        if total >= max_bytes:
            break
        taken.append(document)
        total += document.size
    with closing(_read(taken, "Reading for the tokenizer", [])) as texts:
        # The trainer allocates memory for all ids at once; beyond the 256 bytes, an id takes at least a byte of text.
        return train_tokenizer((text[:max_bytes] for text in texts), min(vocab_size, MIN_VOCAB_SIZE + total))


def _read(documents: Sequence[Document], task: str, skipped: list[str]) -> Generator[str]:
    """The texts of the UTF-8 documents, with a bar on a terminal; names of other documents are added to `skipped`."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        shown = bar.add_task(task, total=sum(document.size for document in documents))
        for document in documents:
            text = document.read()
            bar.advance(shown, document.size)
            if text is None:
                skipped.append(document.name)
            elif text:
                yield text


def _write_indexed(prefix: Path, tokenizer: Tokenizer, documents: Sequence[Document]) -> dict[str, Any]:
    """Writes PREFIX.bin and PREFIX.idx; returns their entry of `prepared.json`."""
    indexed_dataset = import_megatron("datasets.indexed_dataset")
    dtype = indexed_dataset.DType.optimal_dtype(tokenizer.get_vocab_size())
    builder = indexed_dataset.IndexedDatasetBuilder(f"{prefix}.bin", dtype=dtype)
    skipped: list[str] = []
    written = tokens = 0
    with closing(_read(documents, f"Encoding {prefix.name}", skipped)) as texts:
        for ids in encode_documents(tokenizer, texts):
            builder.add_document(np.array(ids, dtype=dtype), [len(ids)])
            written += 1
            tokens += len(ids)
    builder.finalize(f"{prefix}.idx")
    if not written:
        raise ValueError(
            f"None of the {len(documents)} documents for {prefix.name} is UTF-8 text (the first is "
            f"{documents[0].name}): convert them, or pass another source."
        )
    return {"documents": written, "tokens": tokens, "not_utf8": skipped}

"""Checks that Megatron's .bin/.idx pairs are complete, and opens them with Megatron-core.

`PREFIX.bin` holds the token ids of all documents one after another. `PREFIX.idx` holds, in this order and
little-endian: magic `MMIDIDX\\0\\0`, version 1 (uint64), dtype code (uint8), number of sequences n (uint64), number of
document bounds d (uint64), n lengths (int32, tokens), n byte offsets into .bin (int64), d document bounds (int64,
sequence numbers), and for multimodal data n modes (int8).
"""

import importlib
import struct
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from nemo_lowprec.extras import needs_extras

_MAGIC = b"MMIDIDX\x00\x00"
_HEADER_BYTES = 34
_AT_ONCE = 1 << 22  # entries of the index
_AGAIN = "copy it again, or move it away and prepare the data again."


@contextmanager
def quiet_megatron() -> Iterator[None]:
    """Hides Megatron-core's warnings about packages that reading data does not need."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*(Transformer Engine|Apex)")
        # Megatron-core's logger (0.19) warns where torch.distributed is not initialized.
        warnings.filterwarnings("ignore", message="Could not determine (rank|world size)")
        yield


def import_megatron(name: str) -> Any:
    """Imports `megatron.core.<name>`, such as `datasets.indexed_dataset`, quietly.

    Raises:
        ImportError: Megatron-core, or a package that it imports (0.19: Triton), is not installed.
    """
    with quiet_megatron():
        try:
            with needs_extras("Reading Megatron's .bin/.idx data files"):
                return importlib.import_module(f"megatron.core.{name}")
        except ModuleNotFoundError as error:
            raise ImportError(
                f"Megatron's .bin/.idx data files need Megatron-core, which does not import without {error.name} here: "
                f"pip install {error.name}."
            ) from error


def open_indexed(prefix: str | Path) -> Any:
    """Opens the data at a prefix as `megatron.core.datasets.indexed_dataset.IndexedDataset`.

    Args:
        prefix: Path without `.bin` and `.idx`, of data prepared here, by Megatron or by NeMo.

    Returns:
        The IndexedDataset, memory-mapped: `dataset[i]` is a 1-D array of the i-th sequence's ids.

    Raises:
        ValueError: A file is missing, is not of this format, holds no tokens or no ids, or is not as long as the index
            says; or the index, which is read whole, does not describe the sequences one after another.
    """
    prefix = str(prefix)
    indexed_dataset = import_megatron("datasets.indexed_dataset")
    _check_files(Path(prefix + ".idx"), Path(prefix + ".bin"), indexed_dataset.DType)
    with quiet_megatron():
        return indexed_dataset.IndexedDataset(prefix, multimodal=False, mmap=True)


def _check_files(idx: Path, data: Path, dtypes: Any) -> None:
    for path in (idx, data):
        if not path.is_file():
            raise ValueError(f"{path} does not exist: pass the path of a .bin and .idx pair, without the ending.")
    found = idx.stat().st_size
    with idx.open("rb") as stream:
        header = stream.read(_HEADER_BYTES)
    if not header or not _MAGIC.startswith(header[:9]):
        raise ValueError(f"{idx} is not a Megatron index (it starts with {header[:9]!r}).")
    if len(header) < _HEADER_BYTES:
        raise ValueError(_truncated(idx, _HEADER_BYTES, found))
    version, code, sequences, bounds = struct.unpack("<QBQQ", header[9:])
    if version != 1 or code not in {dtype.value for dtype in dtypes}:
        raise ValueError(
            f"{idx} is a Megatron index of version {version} with dtype code {code}, and Megatron-core reads version 1 "
            "with codes 1 to 8: prepare the data again."
        )
    if np.issubdtype(dtypes.dtype_from_code(code), np.floating):
        raise ValueError(f"{idx} says that its data are {dtypes.dtype_from_code(code).__name__}: pass token ids.")
    expected = _HEADER_BYTES + 12 * sequences + 8 * bounds
    if found not in (expected, expected + sequences):
        raise ValueError(_truncated(idx, expected, found))
    expected = _check_sequences(idx, sequences, dtypes.size(code)) * dtypes.size(code)
    _check_documents(idx, sequences, bounds)
    found = data.stat().st_size
    if found != expected:
        raise ValueError(_truncated(data, expected, found))
    if expected == 0:
        raise ValueError(f"{data} holds no tokens: prepare the data again from a source with text.")


def _parts(count: int) -> Iterator[slice]:
    """The slices in which an index is read; the index of a corpus of terabytes takes gigabytes."""
    return (slice(start, min(start + _AT_ONCE, count)) for start in range(0, count, _AT_ONCE))


def _column(idx: Path, kind: str, count: int, offset: int) -> np.ndarray:
    return np.memmap(idx, kind, "r", offset, (count,)) if count else np.empty(0, kind)


def _check_sequences(idx: Path, sequences: int, item_bytes: int) -> int:
    """Check that the sequences of an index follow one another; returns the number of tokens."""
    lengths = _column(idx, "<i4", sequences, _HEADER_BYTES)
    starts = _column(idx, "<i8", sequences, _HEADER_BYTES + 4 * sequences)
    tokens = 0
    for part in _parts(sequences):
        length = np.asarray(lengths[part], np.int64)
        if (length < 0).any():
            at = part.start + int(np.argmax(length < 0))
            raise ValueError(f"{idx} says that sequence {at} has {lengths[at]} tokens: {_AGAIN}")
        ends = tokens + np.cumsum(length)
        wrong = starts[part] != (ends - length) * item_bytes
        if wrong.any():
            at = int(np.argmax(wrong))
            found, wanted = int(starts[part.start + at]), int(ends[at] - length[at]) * item_bytes
            raise ValueError(
                f"{idx} says that sequence {part.start + at} starts at byte {found} of the .bin file, and the "
                f"sequences before it end at byte {wanted}: {_AGAIN}"
            )
        tokens = int(ends[-1])
    return tokens


def _check_documents(idx: Path, sequences: int, bounds: int) -> None:
    """Check that the documents' bounds rise from 0 to the number of sequences."""
    found = _column(idx, "<i8", bounds, _HEADER_BYTES + 12 * sequences)
    rises = all((np.diff(found[part.start : part.stop + 1]) >= 0).all() for part in _parts(bounds))
    if not rises or not bounds or found[0] != 0 or found[-1] != sequences:
        raise ValueError(
            f"{idx} has bounds of documents that do not rise from 0 to its {sequences} sequences: {_AGAIN}"
        )


def _truncated(path: Path, expected: int, found: int) -> str:
    state = "truncated" if found < expected else "longer than its index says"
    return f"{path} is {state}: {expected} bytes expected, {found} found. {_AGAIN.capitalize()}"

"""Opens Megatron's .bin/.idx pairs, after looking whether they are whole.

`PREFIX.bin` holds the token ids of all documents one after another; `PREFIX.idx` holds, in this
order and little-endian: magic `MMIDIDX\\0\\0`, version 1 (uint64), dtype code (uint8), number of
sequences n (uint64), of document bounds d (uint64), n lengths (int32, tokens), n byte offsets into
.bin (int64), d document bounds (int64, sequence numbers), and for multimodal data n modes (int8).
"""

import struct
from pathlib import Path
from typing import Any

import numpy as np

from nemo_lowprec.data.megatron import import_megatron, quiet_megatron

_MAGIC = b"MMIDIDX\x00\x00"
_HEADER_BYTES = 34


def open_indexed(prefix: str | Path) -> Any:
    """Opens the data at a prefix as `megatron.core.datasets.indexed_dataset.IndexedDataset`.

    Args:
        prefix: Path without `.bin` and `.idx`, of data prepared here, by Megatron or by NeMo.

    Returns:
        The IndexedDataset, memory-mapped: `dataset[i]` is a 1-D array of the i-th sequence's ids.

    Raises:
        ValueError: A file is missing, is not of this format, holds no tokens, or is truncated or
            otherwise not as long as the index says.
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
    if header[:9] != _MAGIC[: len(header[:9])] or not header:
        raise ValueError(f"{idx} is not a Megatron index (it starts with {header[:9]!r}).")
    if len(header) < _HEADER_BYTES:
        raise ValueError(_truncated(idx, _HEADER_BYTES, found))
    version, code, sequences, bounds = struct.unpack("<QBQQ", header[9:])
    if version != 1 or code not in {dtype.value for dtype in dtypes}:
        raise ValueError(
            f"{idx} is a Megatron index of version {version} with dtype code {code}, and "
            "Megatron-core reads version 1 with codes 1 to 8: prepare the data again."
        )
    expected = _HEADER_BYTES + 12 * sequences + 8 * bounds
    if found not in (expected, expected + sequences):
        raise ValueError(_truncated(idx, expected, found))
    lengths = np.fromfile(idx, dtype="<i4", count=sequences, offset=_HEADER_BYTES)
    expected = int(lengths.sum(dtype=np.int64)) * dtypes.size(code)
    found = data.stat().st_size
    if found != expected:
        raise ValueError(_truncated(data, expected, found))
    if expected == 0:
        raise ValueError(f"{data} holds no tokens: prepare the data again from a source with text.")


def _truncated(path: Path, expected: int, found: int) -> str:
    state = "truncated" if found < expected else "longer than its index says"
    return (
        f"{path} is {state}: {expected} bytes expected, {found} found. "
        "Copy it again, or move it away and prepare the data again."
    )

"""Fixed-length samples, packed without padding from shuffled documents.

The documents are shuffled and put one after another as one stream. Sample j holds the stream's tokens
[j L, j L + L + 1), so neighbouring samples share one token and every token but the first is a label once. The samples
are then shuffled. For one epoch and the same seed, both shuffles and the bounds equal those of
`megatron.core.datasets.gpt_dataset.GPTDataset`, sample for sample; the tests compare the two classes.

`GPTDataset` itself is not used because of its cache of the shuffled arrays: the cache takes half-written files of a
killed run for complete, misses that the data under a path have changed, and is written by global rank 0 only.
`PackedDataset` builds the arrays in memory from the index alone, in 12 bytes a document and 4 a sample.
"""

import hashlib
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from nemo_lowprec.arguments import checked
from nemo_lowprec.data.indexed import open_indexed

_CHECKED = 64  # samples whose ids are checked before training


class PackedDataset(Dataset[dict[str, Tensor]]):
    """One epoch of packed samples.

    A sample is a dict of `input_ids` and `labels`, int64 of shape [seq_length]. The labels are already shifted:
    `labels[t]` is the token after `input_ids[t]`, so the loss is the cross entropy of `logits[t]` with `labels[t]`.

    Args:
        prefix: Path of a .bin and .idx pair, without the ending.
        seq_length: L, the length of a sample in tokens.
        seed: Seed of the two shuffles.
        vocab_size: Ids must be below this number; None: ids are not checked.

    Raises:
        ValueError: A bad value; data that do not open; fewer than seq_length + 1 tokens; on access: an id that is below
            0 or not below `vocab_size`.
    """

    @checked
    def __init__(self, prefix: str | Path, seq_length: int, seed: int = 0, vocab_size: int | None = None) -> None:
        self.prefix = str(prefix)
        self.seq_length = seq_length
        self.vocab_size = vocab_size
        self.data = open_indexed(prefix)
        lengths = self.data.sequence_lengths
        tokens = int(lengths.sum(dtype=np.int64))
        samples = (tokens - 1) // seq_length
        if samples < 1:
            raise ValueError(
                f"{prefix} has {tokens} tokens, and one sample of seq_length={seq_length} takes {seq_length + 1}: pass "
                "a shorter seq_length or more data."
            )
        random = np.random.RandomState(seed)
        self._order = np.arange(len(lengths), dtype=np.int32)
        random.shuffle(self._order)
        self._ends = np.cumsum(lengths[self._order], dtype=np.int64)
        self._samples = np.arange(samples, dtype=np.uint32 if samples < 2**32 - 1 else np.int64)
        random.shuffle(self._samples)

    @property
    def fingerprint(self) -> str:
        """A hash of the sizes and of the first and last MiB of both files; moving the files does not change it."""
        digest = hashlib.sha256()
        for ending in (".idx", ".bin"):
            with open(self.prefix + ending, "rb") as stream:
                size = stream.seek(0, 2)
                digest.update(size.to_bytes(8, "little"))
                for start in (0, max(0, size - 2**20)):
                    stream.seek(start)
                    digest.update(stream.read(2**20))
        return digest.hexdigest()[:12]

    def __len__(self) -> int:
        """Number of samples: (tokens - 1) // seq_length."""
        return len(self._samples)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """Sample `index` of the shuffled order."""
        tokens = torch.from_numpy(self._tokens(int(self._samples[index])))
        return {"input_ids": tokens[:-1].clone(), "labels": tokens[1:].clone()}

    def check_ids(self) -> None:
        """Checks the ids of 64 samples spread over the data, which may be terabytes.

        Raises:
            ValueError: An id is below 0 or not below `vocab_size`.
        """
        for sample in np.linspace(0, len(self) - 1, min(len(self), _CHECKED), dtype=np.int64):
            self._tokens(int(sample))

    def _tokens(self, sample: int) -> np.ndarray:
        """The seq_length + 1 tokens of a sample in the order of the stream, int64, with checked ids."""
        start = sample * self.seq_length
        stop = start + self.seq_length + 1
        parts = []
        position = int(np.searchsorted(self._ends, start, side="right"))
        while start < stop:
            end = int(self._ends[position])
            document = int(self._order[position])
            length = min(stop, end) - start
            if length:
                offset = int(self.data.sequence_lengths[document]) - (end - start)
                parts.append(self.data.get(document, offset=offset, length=length))
            start += length
            position += 1
        tokens = np.concatenate(parts, dtype=np.int64)
        if self.vocab_size is not None and (largest := int(tokens.max())) >= self.vocab_size:
            raise ValueError(
                f"{self.prefix} has id {largest}, which is not below vocab_size={self.vocab_size}: pass the vocab_size "
                "of the tokenizer that made the data."
            )
        if self.vocab_size is not None and (smallest := int(tokens.min())) < 0:
            raise ValueError(f"{self.prefix}.bin has id {smallest}: ids are not negative. Prepare the data again.")
        return tokens

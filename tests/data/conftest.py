"""A small corpus that is the same on every machine, and its prepared data."""

import random
from pathlib import Path

import numpy as np
import pytest

from nemo_lowprec.data.indexed import import_megatron
from nemo_lowprec.data.prepare import PreparedData, prepare_data

WORDS = ["def", "return", "self", "for", "in", "range", "the", "scale", "überträge", "次元", "\t\n"]


def text(seed: int, words: int = 120) -> str:
    return " ".join(random.Random(seed).choices(WORDS, k=words)) + "\r\n"


@pytest.fixture(scope="session")
def corpus(tmp_path_factory) -> Path:
    """60 text files in two folders; with seed 0 and a fraction of 0.2, some are for validation."""
    root = tmp_path_factory.mktemp("corpus")
    for number in range(60):
        path = root / f"part{number % 2}" / f"{number:02}.txt"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(text(number).encode())
    return root


@pytest.fixture(scope="session")
def prepared(corpus, tmp_path_factory) -> PreparedData:
    return prepare_data(
        tmp_path_factory.mktemp("data") / "prepared",
        corpus,
        vocab_size=300,
        validation_fraction=0.2,
    )


@pytest.fixture(scope="session")
def build_indexed():
    """Writes documents with Megatron's own builder, and returns the prefix."""
    builder_class = import_megatron("datasets.indexed_dataset").IndexedDatasetBuilder

    def build(prefix, documents, dtype=np.uint16, multimodal=False):
        builder = builder_class(f"{prefix}.bin", dtype=dtype, multimodal=multimodal)
        for document in documents:
            builder.add_document(document, [len(document)], *([[0]] if multimodal else []))
        builder.finalize(f"{prefix}.idx")
        return prefix

    return build

"""The tokenizer that goes with exported weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from nemo_lowprec.data.tokenizer import END_OF_DOCUMENT

__all__ = ["load_tokenizer"]


def load_tokenizer(path: Path) -> Any:
    """A tokenizer of transformers, of a ``tokenizer.json`` or of a folder; nothing is downloaded.

    ``<|endoftext|>``, which ends the documents of ``prepare-data``, becomes its end of sequence where it names none.

    Raises:
        ValueError: there is no tokenizer at ``path``.
    """
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    file = path / "tokenizer.json" if path.is_dir() else path
    try:
        if path.is_dir() and (path / "tokenizer_config.json").is_file():
            tokenizer = AutoTokenizer.from_pretrained(str(path), local_files_only=True)
        else:
            tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(file))
    except Exception as error:  # the tokenizers library raises bare Exceptions
        raise ValueError(f"tokenizer={str(path)!r}: no tokenizer.json that can be read ({error}).") from error
    if tokenizer.eos_token is None and END_OF_DOCUMENT in tokenizer.get_vocab():
        tokenizer.eos_token = END_OF_DOCUMENT
    return tokenizer

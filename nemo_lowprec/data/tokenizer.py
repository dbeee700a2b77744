"""A byte-level BPE tokenizer (Sennrich et al. 2016; bytes as in GPT-2), trained on the corpus.

The base alphabet is all 256 bytes, so there is no unknown token and decoding returns exactly the encoded text. Ids run
from 0; `<|endoftext|>`, the end of a document (eod), is 0.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from nemo_lowprec.arguments import RANGES, check_value
from nemo_lowprec.extras import needs_extras

with needs_extras("nemo_lowprec.data"):
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

END_OF_DOCUMENT = "<|endoftext|>"
MIN_VOCAB_SIZE = 257  # the bytes and the end of a document

# ByteLevel makes one word of each such run. The time of BPE grows with the square of a word's length.
_LONGEST = 256
_TOO_LONG = Regex("|".join(f"{kind}{{{_LONGEST}}}" for kind in (r"\p{L}", r"\p{N}", r"[^\s\p{L}\p{N}]", r"\s")))


def check_vocab_size(vocab_size: int) -> None:
    """Raises ValueError for a number of ids that the tokenizer cannot have."""
    check_value("vocab_size", vocab_size, RANGES["vocab_size"])
    if vocab_size < MIN_VOCAB_SIZE:
        raise ValueError(
            f"vocab_size={vocab_size} is less than {MIN_VOCAB_SIZE}, the 256 bytes and {END_OF_DOCUMENT}: pass at "
            "least that."
        )


def train_tokenizer(texts: Iterable[str], vocab_size: int = 8192) -> Tokenizer:
    """Trains the tokenizer; the same texts give the same tokenizer.json.

    Words of more than 256 characters are cut after every 256.

    Args:
        texts: The training texts, read one by one.
        vocab_size: Number of ids, the 256 bytes and the end of a document included. A small corpus gives fewer ids when
            no pair is left that occurs twice.

    Raises:
        ValueError: `vocab_size` is less than 257.
    """
    check_vocab_size(vocab_size)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(_TOO_LONG, "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        special_tokens=[END_OF_DOCUMENT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def load_tokenizer(path: Path) -> Tokenizer:
    """Reads a tokenizer.json.

    Raises:
        ValueError: The file cannot be read, or is no tokenizer.
    """
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing more particular
        raise ValueError(f"{path} is no tokenizer ({str(error).splitlines()[0]}): copy it again.") from error


def load_transformers_tokenizer(path: Path) -> Any:
    """Reads a tokenizer.json, or a folder with one, as a tokenizer of transformers; nothing is downloaded.

    A tokenizer without an end of sequence gets `<|endoftext|>`, which ends the documents of `prepare_data`.

    Raises:
        ValueError: There is no tokenizer at `path`.
    """
    with needs_extras("A tokenizer of transformers"):
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


def encode_documents(tokenizer: Tokenizer, texts: Iterable[str]) -> Iterator[list[int]]:
    """The ids of each text in order, with the end of a document appended; uses all cores.

    The tokenizer then encodes the characters `<|endoftext|>` in a text as characters, not as the end of a document.
    """
    end = tokenizer.get_vocab()[END_OF_DOCUMENT]
    tokenizer.encode_special_tokens = True
    for batch in _batches(texts, characters=1 << 21):
        for encoding in tokenizer.encode_batch_fast(batch, add_special_tokens=False):
            yield [*encoding.ids, end]


def _batches(texts: Iterable[str], characters: int) -> Iterator[list[str]]:
    batch: list[str] = []
    total = 0
    for text in texts:
        batch.append(text)
        total += len(text)
        if total >= characters:
            yield batch
            batch, total = [], 0
    if batch:
        yield batch

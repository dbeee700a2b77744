"""The text of the convergence runs: the sources of Linux and of Python packages, prepared and packed.

    apt-get download linux-source-6.1=6.1.176-1 && dpkg-deb -x linux-source-6.1_*.deb debian
    pip install --no-deps --target python django==5.2.9 sympy==1.14.0 transformers==5.17.0 networkx==3.6.1 \\
        ansible-core==2.19.14 twisted==26.10.0
    python -m benchmarks.convergence_text debian/usr/src/linux-source-6.1.tar.xz --python python --out data/convergence

Files above 256 kB and AMD's register headers are generated tables, and are left out. Beside the prepared data lies
``kinds.bin/.idx``: for each token of the validation data its kind, of ``KINDS``, by Pygments' lexers of C and Python.
"""

from __future__ import annotations

import argparse
import hashlib
import shutil
import tarfile
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from pygments.lexer import Lexer
from pygments.lexers import CLexer, PythonLexer
from pygments.token import Comment, Keyword, Name, Number, Operator, Punctuation, String, Whitespace

from nemo_lowprec.data import PreparedData, prepare_data
from nemo_lowprec.data.corpus import Document, limit_bytes, list_documents, split_documents
from nemo_lowprec.data.indexed import import_megatron

KINDS = (
    "other", "space", "punctuation", "keyword", "new name", "name seen before", "number", "string", "comment",
    "preprocessor",
)  # fmt: skip
_ENDINGS = (".c", ".h", ".S", ".rst", ".txt", ".py", ".dts", ".dtsi", ".yaml")
_LARGEST = 256_000  # bytes


def write_texts(linux: Path, python: list[Path], out: Path) -> None:
    """Copy the texts to ``out/linux`` and ``out/python``."""
    with tarfile.open(linux) as archive:
        for member in archive:
            table = member.size > _LARGEST or "/asic_reg/" in member.name
            if member.isfile() and member.name.endswith(_ENDINGS) and not table:
                member.name = f"linux/{member.name.partition('/')[2]}"
                archive.extract(member, out, filter="data")
    for number, folder in enumerate(python):
        for path in folder.rglob("*.py"):
            if path.stat().st_size <= _LARGEST and path.is_file():
                to = out / "python" / str(number) / path.relative_to(folder)
                to.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, to)


def kinds_of(text: str, lexer: Lexer | None) -> np.ndarray:
    """The kind of each character, uint8 [characters]: an index of ``KINDS``. Without a lexer all are ``other``."""
    kinds = np.zeros(len(text), dtype=np.uint8)
    seen: set[str] = set()
    for start, token, value in lexer.get_tokens_unprocessed(text) if lexer is not None else ():
        kind = next((kind for of, kind in _KIND_OF if token in of), "other")
        if not value.strip():
            kind = "space"
        elif kind == "new name" and value in seen:
            kind = "name seen before"
        seen.add(value)
        kinds[start : start + len(value)] = KINDS.index(kind)
    return kinds


_KIND_OF: tuple[tuple[Any, str], ...] = (
    (Comment.Preproc, "preprocessor"), (Comment.PreprocFile, "preprocessor"), (Comment, "comment"),
    (String, "string"), (Number, "number"), (Keyword, "keyword"), (Operator.Word, "keyword"), (Name, "new name"),
    (Operator, "punctuation"), (Punctuation, "punctuation"), (Whitespace, "space"),
)  # fmt: skip


def _lexer(name: str) -> Lexer | None:
    lexers = {".c": CLexer, ".h": CLexer, ".py": PythonLexer}
    of = lexers.get(Path(name).suffix)
    # A lexer otherwise strips lines and ends the text with a new one, so that its positions are not the text's.
    return None if of is None else of(stripnl=False, ensurenl=False)


def write_kinds(prepared: PreparedData, documents: list[Document]) -> dict[str, int]:
    """Write ``kinds.bin/.idx`` beside the validation data, with as many kinds for each document as it has tokens.

    Args:
        documents: the validation documents, in the order of the prepared data.

    Returns:
        Tokens of each kind.
    """
    indexed = import_megatron("datasets.indexed_dataset")
    tokenizer = prepared.load_tokenizer()
    tokenizer.encode_special_tokens = True
    builder = indexed.IndexedDatasetBuilder(str(prepared.path / "kinds.bin"), dtype=np.uint16)
    count = np.zeros(len(KINDS), dtype=np.int64)
    for document in documents:
        if text := document.read():
            characters = kinds_of(text, _lexer(document.name))
            ends = np.array([end for _, end in tokenizer.encode(text, add_special_tokens=False).offsets])
            kinds = np.append(characters[ends - 1], 0).astype(np.uint16)  # the end of the document is "other"
            builder.add_document(kinds, [len(kinds)])
            count += np.bincount(kinds, minlength=len(KINDS))
    builder.finalize(str(prepared.path / "kinds.idx"))
    return dict(zip(KINDS, count.tolist(), strict=True))


def digest(data: Path) -> str:
    """The first 16 hexadecimal digits of SHA-256 over the tokens for training and validation: equal for equal texts."""
    found = hashlib.sha256()
    for name in ("train.bin", "validation.bin"):
        with (data / name).open("rb") as file:
            while piece := file.read(1 << 24):
                found.update(piece)
    return found.hexdigest()[:16]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("linux", type=Path, help="the archive of linux-source")
    parser.add_argument("--python", type=Path, nargs="*", default=[], help="folders with .py files")
    parser.add_argument("--max-bytes", type=int, default=640_000_000)
    parser.add_argument("--out", type=Path, default=Path("data/convergence"))
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        texts = Path(folder)
        write_texts(args.linux, args.python, texts)
        prepared = prepare_data(
            args.out, texts, vocab_size=16384, validation_fraction=0.01, max_bytes=args.max_bytes,
            tokenizer_bytes=30_000_000,
        )  # fmt: skip
        documents = limit_bytes(list_documents(texts), args.max_bytes, 0)
        _, validation = split_documents(documents, 0.01, 0)
        kinds = write_kinds(prepared, validation)
    print(digest(prepared.path), prepared.record["train"], prepared.record["validation"], kinds)


if __name__ == "__main__":
    main()

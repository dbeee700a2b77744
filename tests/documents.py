"""Code of README.rst and docs/, block by block, as printed."""

from __future__ import annotations

import re
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["DOCS", "DOCUMENTS", "ROOT", "Block", "block", "blocks", "inline_commands", "python"]

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
DOCUMENTS = [ROOT / "README.rst", *sorted(DOCS.rglob("*.rst"))]
_BLOCK = re.compile(r"^\.\. code-block:: (\w+)\n(?:   :\w+:.*\n)*\n((?:   .*\n|\n)+)", re.MULTILINE)
_INLINE = re.compile(r"(?:``|^# {1,3}|^ {4}|^)(nemo-lowprec (?:pretrain|audit|plan|advise|run) [^`\n]*)", re.MULTILINE)


@dataclass(frozen=True)
class Block:
    """One ``code-block``.

    Attributes:
        document: path of the page below docs/, such as ``launching.rst`` or ``levels/te_fp8.rst``; or ``README.rst``.
        language: ``bash``, ``python``, ``yaml`` or ``text``.
        code: without its indentation.
    """

    document: str
    language: str
    code: str

    @property
    def lines(self) -> list[str]:
        """Its commands: a line that ends in a backslash goes on."""
        return self.code.replace("\\\n", " ").splitlines()


def blocks() -> list[Block]:
    """Every block of every document."""
    found = []
    for path in DOCUMENTS:
        name = path.relative_to(DOCS if path.is_relative_to(DOCS) else ROOT).as_posix()
        for language, code in _BLOCK.findall(path.read_text()):
            found.append(Block(name, language, textwrap.dedent(code).strip()))
    return found


def block(document: str, start: str) -> Block:
    """The block of a document that starts with these words; there is one."""
    (found,) = (b for b in blocks() if b.document == document and b.code.startswith(start))
    return found


def python(b: Block, **names: Any) -> dict[str, Any]:
    """Run a block of Python; what it has made."""
    exec(compile(b.code, b.document, "exec"), names)
    return names


def inline_commands() -> list[str]:
    """Commands within sentences of the documents, comments of the package's YAML, and its docstrings."""
    package = [p for ending in ("py", "yaml") for p in (ROOT / "nemo_lowprec").rglob(f"*.{ending}")]
    found: dict[str, None] = {}
    for path in [*DOCUMENTS, ROOT / "CONTRIBUTING.md", *package]:
        text = re.sub(r"``([^`]*)``", lambda m: "``" + " ".join(m[1].split()) + "``", path.read_text())
        found |= dict.fromkeys(line.strip() for line in _INLINE.findall(_BLOCK.sub("", text)) if "..." not in line)
    return list(found)

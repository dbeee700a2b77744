"""The lines that put a level into a Trainer or onto a command line."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn

_HYDRA = {"None": "null", "True": "true", "False": "false"}


def with_skip(options: Mapping[str, Any], skip: Sequence[str]) -> dict[str, Any]:
    """``options`` of a level with further layers in ``skip``."""
    own = options.get("skip") or ()
    every = [*([own] if isinstance(own, str) else own), *skip]
    return {**options, **({"skip": every} if every else {})}


def python_line(level: str, options: Mapping[str, Any]) -> str:
    """The argument of a Trainer: ``plugins=bf16_with_fp8_mixed(skip=["head"])``."""
    given = (f"{name}={json.dumps(v) if name == 'skip' else repr(v)}" for name, v in options.items())
    return f"plugins={level}({', '.join(given)})"


def hydra_line(level: str, options: Mapping[str, Any]) -> str:
    """The same as overrides of ``nemo-lowprec pretrain``, as a shell reads them."""
    words = [f"precision={level}"]
    for name, value in options.items():
        text = f"[{','.join(map(str, value))}]" if isinstance(value, list | tuple) else str(value)
        words.append(f"precision.{name}={_HYDRA.get(text, text)}")
    return " ".join(map(shlex.quote, words))


def modules_of(model: nn.Module, layers: Iterable[str]) -> list[str]:
    """The modules of ``layers``: ``skip`` takes the names of modules, and a module may hold several weights."""
    modules = dict(model.named_modules())
    return list(dict.fromkeys(name if name in modules else name.rpartition(".")[0] for name in layers))


def patterns_of(layers: Sequence[str], converted: Iterable[str]) -> list[str]:
    """Names and globs that ``skip`` takes for exactly these layers of the ``converted`` ones.

    ``*.NAME`` stands for all layers whose last name is NAME, where there are several.
    """
    wanted, found = set(layers), []
    for name in dict.fromkeys(layer.rpartition(".")[2] for layer in layers):
        alike = [layer for layer in converted if layer.endswith(f".{name}")]
        if len(alike) > 1 and wanted.issuperset(alike):
            found.append(f"*.{name}")
            wanted -= set(alike)
    return found + [layer for layer in layers if layer in wanted]

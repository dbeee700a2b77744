"""JSON lines: an origin names the command, the versions, the GPU and the date of the figures after it, one object each.

A file written in parts holds an origin for each.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import shlex
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch

__all__ = ["RESULTS", "Record", "arguments", "earlier", "lines", "origins_of", "read", "versions"]

RESULTS = Path(__file__).parent / "results"
_PACKAGES = (
    "torch", "lightning", "transformers", "transformer-engine", "torchao", "triton", "megatron-core", "timm",
    "liger-kernel", "accelerate", "nemo-run", "nemo-toolkit", "hydra-core",
)  # fmt: skip


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def versions() -> dict[str, str | None]:
    """Versions of the packages that figures depend on; None for those that are not installed."""
    return {name: _version(name) for name in _PACKAGES}


def _without_out(words: list[str]) -> list[str]:
    at = words.index("--out") if "--out" in words else len(words)
    return words[:at] + words[at + 2 :]


def _links_off() -> list[str]:
    """``NCCL_P2P_DISABLE=1`` and the like, of this process's environment."""
    return [f"{n}={v}" for n, v in sorted(os.environ.items()) if n.startswith("NCCL_") and n.endswith("_DISABLE")]


class Record:
    """Prints figures and keeps them in a file, written as they come.

    Args:
        path: the file, begun anew.
        keep: objects of an earlier part, origins included; they come first. An origin that none of them follows
            is left out: its figures have been measured again since.
    """

    def __init__(self, path: Path, keep: Sequence[dict[str, Any]] = ()) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        module = sys.modules["__main__"].__spec__
        name = f"-m {module.name}" if module is not None else sys.argv[0]
        gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
        self._file = path.open("w")
        for line, after in zip_longest(keep, keep[1:]):
            if "command" not in line or (after is not None and "command" not in after):
                self.add(**line)
        self.add(
            command=" ".join((*_links_off(), "python", name, shlex.join(_without_out(sys.argv[1:])))).strip(),
            date=datetime.date.today().isoformat(),
            gpu=torch.cuda.get_device_name() if gpus else None,
            gpus=gpus,
            cuda=torch.version.cuda,
            python=sys.version.split()[0],
            versions=versions(),
        )

    def add(self, **figure: Any) -> None:
        """Write one object."""
        line = json.dumps(figure)
        print(line, flush=True)
        self._file.write(line + "\n")
        self._file.flush()


def arguments(description: str, default: str) -> argparse.ArgumentParser:
    """A parser with ``--out``, the file of results."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--out", type=Path, default=RESULTS / default, help="file of results")
    return parser


def lines(path: Path) -> list[dict[str, Any]]:
    """Every object of a file of results, in order."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def earlier(path: Path, benchmark: str) -> list[dict[str, Any]]:
    """What a file of results that is to be continued holds: its origins and the figures of ``benchmark``."""
    done = lines(path) if path.exists() else []
    return [line for line in done if "command" in line or line["benchmark"] == benchmark]


def read(path: Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The origins and the figures of a file of results."""
    objects = lines(path)
    return [o for o in objects if "command" in o], [o for o in objects if "command" not in o]


def origins_of(path: Path, shown: Callable[[dict[str, Any]], bool]) -> list[dict[str, Any]]:
    """The origins of those figures of a file of results of which ``shown`` is true."""
    found: list[dict[str, Any]] = []
    for line in lines(path):
        if "command" in line:
            here = line
        elif shown(line) and here not in found:
            found.append(here)
    return found

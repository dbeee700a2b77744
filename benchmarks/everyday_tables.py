"""The table and the picture of whole training steps of the models that most people train."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import geometric_mean
from typing import Any

from benchmarks.everyday_contestants import EAGER, LEVELS, OURS, TE_LAYERS
from benchmarks.pictures import Bar, Bars, Picture
from benchmarks.record import RESULTS, read
from benchmarks.rst import block, failure, origin, simple_table

__all__ = ["everyday", "everyday_picture", "figures"]

_RESULTS = RESULTS / "everyday.jsonl"
DEFAULT = "bf16_with_fp8_mixed"  # the level of prepare()
_COLUMNS = {  # contestant to its column's title
    f"{EAGER}, blocks compiled": "BF16, compiled",
    f"{EAGER}, blocks compiled, reduce-overhead": "BF16, reduce-overhead",
    "te.Linear, FP8": "te.Linear",
    TE_LAYERS: "te.TransformerLayer",
    "torchao float8, blocks compiled": "torchao, compiled",
}
_PICTURED = ("timm ViT-L", "Swin-1.0B", "BERT-large", "Llama 1.1B, 4 x 2048", "Llama 8B-shaped")


def figures() -> dict[str, dict[str, dict[str, Any]]]:
    """Figures of everyday.jsonl, by model and contestant; those with an error, too."""
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for f in read(_RESULTS)[1]:
        found.setdefault(f["model"], {})[f["name"]] = f
    return found


def _gains(found: dict[str, dict[str, dict[str, Any]]], name: str) -> list[float]:
    """``x`` of a contestant, of every model that it has figures of."""
    return [of[name]["x"] for of in found.values() if "x" in of.get(name, {})]


def _cell(figure: dict[str, Any] | None) -> str:
    """Wall time's gain, and GPU time's in brackets."""
    if figure is None:
        return "–"
    if "error" in figure:
        return failure(figure)
    gpu = figure["gpu_x"]
    return f"{figure['x']:.2f}" + ("" if gpu is None else f" ({gpu:.2f})")


def _ms(figure: dict[str, Any]) -> str:
    if "error" in figure:
        return failure(figure)
    gpu = figure["gpu_ms"]
    return f"{figure['ms']:.1f}" + ("" if gpu is None else f" ({gpu:.1f})")


def everyday() -> str:
    """Milliseconds of BF16 autocast, and how many times as fast the others are."""
    found = figures()
    said = []
    for level in LEVELS:
        gains = _gains(found, OURS + level)
        faster = sum(gain >= 1 for gain in gains)
        said.append(
            f"``{level}`` with default arguments is {geometric_mean(gains):.2f} × as fast as BF16 autocast in the "
            f"geometric mean of {len(gains)} models, and not slower on {faster} of them"
        )
    ours = dict.fromkeys(name for of in found.values() for name in of if name.startswith(OURS))
    columns = {name: title for name, title in _COLUMNS.items() if any(name in of for of in found.values())}
    columns |= {name: name.removeprefix(OURS) for name in ours}
    table = simple_table(
        ("Model", "BF16 autocast, ms (GPU)", *(f"{title}, ×" for title in columns.values())),
        [(model, _ms(of[EAGER]), *(_cell(of.get(name)) for name in columns)) for model, of in found.items()],
    )
    return block(f"{'; '.join(said)}.", table, origin(read(_RESULTS)[0], "transformers", "timm", "torchao"))


def _best(of: dict[str, dict[str, Any]], names: Sequence[str]) -> dict[str, Any]:
    return max((of[name] for name in names if "x" in of.get(name, {})), key=lambda f: f["x"])


def everyday_picture() -> Picture:
    """The default level beside the fastest of BF16 autocast, of five models; the model with the highest gain on top."""
    found = figures()
    pairs = []
    for model, of in found.items():
        if any(part in model for part in _PICTURED) and "x" in of.get(OURS + DEFAULT, {}):
            bf16 = _best(of, [name for name in of if name.startswith(EAGER)])
            pairs.append((model, of[OURS + DEFAULT], bf16))
    pairs.sort(key=lambda pair: -pair[1]["x"])
    rows: list[Bar] = []
    for model, ours, bf16 in pairs:
        for figure, name in ((ours, OURS + DEFAULT), (bf16, f"fastest BF16 ({_way(bf16['name'])})")):
            end = f"{figure['x']:.2f} × ({figure['ms']:.0f} ms)"
            rows.append(Bar(f"{name},\n{model}", figure["x"], end, figure is ours))
    gains = _gains(found, OURS + DEFAULT)
    gpu = read(_RESULTS)[0][0]["gpu"]
    return Picture(
        "everyday.png",
        f"``{DEFAULT}`` with default arguments is between {min(gains):.2f} and {max(gains):.2f} × as fast as BF16 "
        f"autocast on {len(gains)} models.",
        "Bars: five rows of the table below, each with the fastest of BF16 autocast eager, compiled and with CUDA "
        "graphs.",
        Bars(f"× BF16 autocast, eager (in brackets: ms a step)\nwhole training steps, one {gpu}", tuple(rows)),
    )


def _way(name: str) -> str:
    """How a contestant of BF16 autocast runs."""
    return name.removeprefix(EAGER).rpartition(", ")[2] or "eager"

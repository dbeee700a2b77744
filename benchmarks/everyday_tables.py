"""The table and the picture of whole training steps of the models that most people train."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from statistics import geometric_mean
from typing import Any

from benchmarks.everyday_contestants import COMPILED, EAGER, LEVELS, OURS, TE_LAYERS
from benchmarks.pictures import Bar, Bars, Picture
from benchmarks.record import RESULTS, origins_of, read
from benchmarks.rst import block, failure, origin, simple_table

__all__ = ["everyday", "everyday_picture", "figures", "large", "others"]

_RESULTS = RESULTS / "everyday.jsonl"
DEFAULT = "bf16_with_fp8_mixed"  # the level of prepare()
_OTHERS = {  # contestant to its column's title
    "te.Linear, FP8": "te.Linear",
    f"{EAGER}, blocks compiled": "compiled",
    f"{EAGER}, blocks compiled, reduce-overhead": "with graphs",
    "torchao float8, blocks compiled": "torchao",
}
_LARGEST = "8B-shaped"
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


def _cell(figure: dict[str, Any] | None, gpu: bool = False) -> str:
    """Wall time's gain; with ``gpu`` GPU time's in brackets."""
    if figure is None:
        return "–"
    if "error" in figure:
        return failure(figure)
    return f"{figure['x']:.2f}" + (f" ({figure['gpu_x']:.2f})" if gpu and figure["gpu_x"] is not None else "")


def _ms(figure: dict[str, Any]) -> str:
    if "error" in figure:
        return failure(figure)
    gpu = figure["gpu_ms"]
    return f"{figure['ms']:.1f}" + ("" if gpu is None else f" ({gpu:.1f})")


def _origin(models: Collection[str], names: Collection[str] | None = None) -> str:
    """Where the figures of ``models`` come from; ``names``: of these contestants only."""
    shown = origins_of(_RESULTS, lambda f: f["model"] in models and (names is None or f["name"] in names))
    return origin(shown, "transformers", "timm", "torchao")


def everyday() -> str:
    """Milliseconds of BF16 autocast, and how many times as fast two levels are with default arguments."""
    found = figures()
    said = []
    for level in LEVELS:
        gains = _gains(found, OURS + level)
        faster = sum(gain >= 1 for gain in gains)
        said.append(
            f"``{level}`` with default arguments is {geometric_mean(gains):.2f} × as fast as BF16 autocast in the "
            f"geometric mean of {len(gains)} models, and not slower on {faster} of them"
        )
    table = simple_table(
        ("Model", "BF16, ms (GPU)", *LEVELS),
        [
            (model, _ms(of[EAGER]), *(_cell(of.get(OURS + level), True) for level in LEVELS))
            for model, of in found.items()
        ],
    )
    return block(f"{'; '.join(said)}.", table, _origin(found, (EAGER, *(OURS + level for level in LEVELS))))


def others() -> str:
    """How many times as fast as BF16 autocast the others are, and the fastest of this project's contestants."""
    found = {model: of for model, of in figures().items() if _has_compiled(of)}
    rows, gains = [], []
    for model, of in found.items():
        own = [name for name in of if name.startswith(OURS)]
        compiled = [name for name in own if any(name.endswith(f", {how}") for how in COMPILED)]
        best = _best(of, own)
        gains.append(best["x"] / _best(of, [name for name in of if name.startswith(EAGER)])["x"])
        ways = ([name for name in own if name not in compiled], compiled)
        rows.append((model, *(_cell(of.get(name)) for name in _OTHERS), *(_fastest(of, names) for names in ways)))
    said = (
        f"The fastest of this project's contestants is between {min(gains):.2f} and {max(gains):.2f} × as fast as the "
        "fastest of BF16 autocast, eager, with compiled blocks and with CUDA graphs of these."
    )
    titles = ("× BF16 autocast, eager", *_OTHERS.values(), "ours", "ours, compiled")
    return block(said, simple_table(titles, rows), _origin(found))


def _has_compiled(of: dict[str, dict[str, Any]]) -> bool:
    """Whether BF16 autocast was measured with compiled blocks, too."""
    return any(f"{EAGER}, {how}" in of for how in COMPILED)


def _fastest(of: dict[str, dict[str, Any]], names: Sequence[str]) -> str:
    """The cell of the fastest of ``names``; of a failure where all have failed."""
    measured = [name for name in names if "x" in of[name]]
    return _cell(_best(of, measured) if measured else of[names[0]] if names else None)


def large() -> str:
    """Everybody at the 8B shape: whole steps, forward and backward, and the rest of the kernels (``kernel_kinds``)."""
    ((model, of),) = ((model, of) for model, of in figures().items() if _LARGEST in model)
    ours = [name for name in of if name.startswith(OURS)]
    best, layers = max((of[name] for name in ours), key=lambda f: f["passes_x"]), of.get(TE_LAYERS)
    said = f"Forward and backward take {best['passes_ms']:.1f} ms at {best['name'].removeprefix(OURS)}"
    if layers is not None:
        said += f", and {layers['passes_ms']:.1f} where the model is rewritten in Transformer Engine's layers"
    names = sorted((name for name in of if "x" in of[name]), key=lambda name: of[name]["ms"])
    rows = [
        (
            name.removeprefix(OURS), f"{f['ms']:.1f}", f"{f['x']:.2f}", f"{f['passes_ms']:.1f}", f"{f['passes_x']:.2f}",
            f"{f['gpu_kinds']['other']:.1f}" if "gpu_kinds" in f else "–",
        )
        for name, f in ((name, of[name]) for name in names)
    ]  # fmt: skip
    return block(f"{said}.", simple_table(("Contestant", "step", "×", "passes", "×", "rest"), rows), _origin([model]))


def _best(of: dict[str, dict[str, Any]], names: Sequence[str]) -> dict[str, Any]:
    return max((of[name] for name in names if "x" in of.get(name, {})), key=lambda f: f["x"])


def everyday_picture() -> Picture:
    """The default level beside the fastest of BF16 autocast, of up to five models; the highest gain on top."""
    found = figures()
    pairs = []
    for model, of in found.items():
        if any(p in model for p in _PICTURED) and _has_compiled(of) and "x" in of.get(OURS + DEFAULT, {}):
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
        f"autocast, eager, on {len(gains)} models.",
        f"Bars: {len(pairs)} of the models, each beside the fastest of BF16 autocast eager, compiled and with CUDA "
        "graphs; the tables of ``docs/measured.rst`` have all.",
        Bars(f"× BF16 autocast, eager (in brackets: ms a step)\nwhole training steps, one {gpu}", tuple(rows)),
    )


def _way(name: str) -> str:
    """How a contestant of BF16 autocast runs."""
    return name.removeprefix(EAGER).rpartition(", ")[2] or "eager"

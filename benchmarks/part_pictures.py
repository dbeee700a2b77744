"""Pictures of the shorter tables of docs/measured.rst: rowwise scaling, parts of a step, accuracy on images."""

from __future__ import annotations

from collections.abc import Callable
from operator import itemgetter
from typing import Any

from benchmarks.everyday_contestants import OURS
from benchmarks.loss_parity import BASELINE
from benchmarks.muon import BASELINE as BESIDE
from benchmarks.pictures import Bar, Bars, Dots, Picture, bars
from benchmarks.record import RESULTS, read

__all__ = ["PICTURES"]

_GPU = "one NVIDIA H200"


def _read(name: str, benchmark: str) -> list[dict[str, Any]]:
    return [f for f in read(RESULTS / f"{name}.jsonl")[1] if f["benchmark"] == benchmark]


def rowwise() -> Picture:
    """Every contestant of the table."""
    figures = _read("rowwise_h200", "train_step")
    most = max(figures, key=itemgetter("tokens_per_s"))
    see = f"``{most['name'].removeprefix(OURS)}`` is the fastest of the {len(figures)}."
    names = {f["name"]: f["name"].replace(", ", ",\n", 1) for f in figures}
    shown = bars("tokens/s (in brackets: GiB at the peak)", figures, names)
    return Picture("rowwise_h200.png", see, "Bars: all rows of the table below.", shown)


def muon() -> Picture:
    """The steps of Muon, Lion and SGD."""
    figures = _read("muon_h200", "muon_step")
    rows = [Bar(f["name"], f["ms"], f"{f['ms']:.2f}", f["name"].startswith(OURS)) for f in figures]
    by = {f["name"]: f["ms"] for f in figures}
    see = (
        f"Muon's step takes {by['nemo_lowprec Muon, O2']:.0f} ms, and that of torch's Muon and AdamW {by[BESIDE]:.0f}; "
        f"those of Lion and SGD take {by['nemo_lowprec Lion, O2']:.1f} and {by['nemo_lowprec SGD, O2']:.1f} ms."
    )
    shown = "Bars: all rows of the table below."
    return Picture("muon_step_h200.png", see, shown, Bars(f"ms a step, 1.1 B parameters, {_GPU}", tuple(rows)))


def backends() -> Picture:
    """A layer's quantization and GEMMs on each backend, beside BF16."""
    times = {(f.get("scaling"), f["backend"]): f["ms"] for f in _read("backends_h200", "backends_time")}
    half = times[None, "bf16"]
    rows = [Bar("BF16 GEMMs of torch", half, f"{half:.2f}", False)]
    for (scaling, backend), ms in times.items():
        if scaling is not None:
            rows.append(Bar(f"{OURS}{scaling} scaling,\nbackend {backend}", ms, f"{ms:.2f}", True))
    low = [bar.value for bar in rows[1:]]
    least, most = half / max(low), half / min(low)
    see = f"Quantization and all three GEMMs are {least:.2f} to {most:.2f} × as fast as GEMMs in BF16."
    shown = "Bars: one layer of Llama-8B's MLP, forward and backward; the table has errors, too."
    return Picture("backends_h200.png", see, shown, Bars(f"ms, {_GPU}", tuple(rows)))


def casts() -> Picture:
    """The speed of quantization, for each operand."""
    figures = _read("backends_h200", "backends_cast")
    rows = []
    for f in figures:
        ours = f["name"] != "Transformer Engine"
        name = f"{OURS}{f['name']}" if ours else f["name"]
        rows.append(Bar(f"{name},\n{f['operand']}, {f['shape']}", f["gb_per_s"], f"{f['gb_per_s']:,}", ours))
    least = min(f["gb_per_s"] for f in figures)
    see = f"Operands are quantized into both orientations at {least:,} GB/s and more."
    return Picture("casts_h200.png", see, "Bars: all rows of the table below.", Bars(f"GB/s, {_GPU}", tuple(rows)))


def patch_embedding() -> Picture:
    """The default level beside cuDNN's convolution, on the models with the largest and smallest share."""
    by: dict[str, dict[str, float]] = {}
    for f in _read("patch_embedding_h200", "patch_embedding"):
        by.setdefault(f["layer"], {})[f["name"]] = f["gpu_ms"]
    level = "bf16_with_fp8_mixed"
    layers = sorted(by, key=lambda layer: by[layer][level] / by[layer]["cuDNN"])
    rows = []
    for layer in [*layers[:3], *layers[-2:]]:
        for name in (level, "cuDNN"):
            ms = by[layer][name]
            rows.append(Bar(f"{OURS if name == level else ''}{name},\n{layer}", ms, f"{ms:.2f}", name == level))
    first, last = (by[layer][level] / by[layer]["cuDNN"] for layer in (layers[0], layers[-1]))
    see = f"``{level}`` takes {first:.2f} to {last:.2f} of the time of cuDNN's convolution."
    shown = f"Bars: five of the {len(layers)} layers, those that gain most and least."
    return Picture("patch_embedding_h200.png", see, shown, Bars(f"ms of the GPU, {_GPU}", tuple(rows)))


def image_parity() -> Picture:
    """Distances of accuracies from the baseline's of the same seed."""
    figures = _read("image_parity_h200", "image_parity")
    by = {(f["level"], f["seed"]): 100 * f["accuracy"] for f in figures if "accuracy" in f}
    rows: dict[str, dict[int, float]] = {}
    for (level, seed), accuracy in by.items():
        if level != BASELINE:
            rows.setdefault(level, {})[seed] = round(accuracy - by[BASELINE, seed], 2)
    means = {level: sum(of.values()) / len(of) for level, of in rows.items()}
    own = [accuracy for (level, _), accuracy in by.items() if level == BASELINE]
    see = f"Means lie {min(means.values()):+.2f} to {max(means.values()):+.2f} points from that of ``{BASELINE}``."
    ends = "; ".join(f"{level} {mean:+.2f}" for level, mean in means.items())
    xlabel = f"points of test accuracy beside {BASELINE} of the same seed"
    alt = f"Dots of {xlabel}, means: {ends}."
    band = ((max(own) - min(own)) / 2, f"spread of {BASELINE}'s seeds")
    return Picture(
        "image_parity_h200.png", see, "Rows: all other levels of the table below.", Dots(xlabel, rows, alt, band)
    )


PICTURES: dict[str, Callable[[], Picture]] = {
    "rowwise_picture": rowwise,
    "muon_picture": muon,
    "backends_picture": backends,
    "casts_picture": casts,
    "patch_embedding_picture": patch_embedding,
    "image_parity_picture": image_parity,
}

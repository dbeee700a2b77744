"""Tables and pictures of what Megatron-core does with the levels."""

from __future__ import annotations

import statistics
from typing import Any

from benchmarks.megatron_parity import LAYOUTS, smoothed
from benchmarks.megatron_step import LEVELS
from benchmarks.pictures import LINES, Dots, Line, Lines, Panel, Picture
from benchmarks.record import RESULTS, read
from benchmarks.rst import block, failure, milliseconds, origin, simple_table

__all__ = [
    "called", "megatron_parity", "megatron_seeds", "megatron_step", "parity_picture", "seeds_picture", "steps",
]  # fmt: skip

_STEP, _PARITY = RESULTS / "megatron_step_h200.jsonl", RESULTS / "megatron_parity_h200.jsonl"


_IN_WORDS = {  # what runs are called in pictures
    "transformers, DP2": "transformers, data-parallel",
    "transformers, fused": "transformers, fused matrices",
    "TP1": "MegatronStrategy, one GPU",
    "TP2": "MegatronStrategy, tensor-parallel",
    "PP2": "MegatronStrategy, pipeline",
    "DP2": "MegatronStrategy, data-parallel",
}
_DRAWN = {layout: name for layout, name in _IN_WORDS.items() if layout != "TP1"}
_OPTIONS = {"": "", "fp16": '(half="fp16")', "fp8_params": "(fp8_params=True)"}


def called(name: str) -> str:
    """A level's call, of a name such as ``msamp_o2+fp16``."""
    level, _, variant = name.partition("+")
    return f"``{level}{_OPTIONS[variant]}``"


def steps() -> dict[tuple[str, str], dict[str, Any]]:
    """Whole steps on one GPU, by level and path."""
    return {(f["level"], f["path"]): f for f in read(_STEP)[1] if f["gpus"] == 1 and "ms" in f}


def megatron_step() -> str:
    """Whole steps on Megatron-core, from megatron_step_h200.jsonl."""
    origins, figures = read(_STEP)
    figures.sort(key=lambda f: (f["gpus"], LEVELS.index(f["level"])))  # levels may have been measured in any order
    ratios = [f["of_bare"] for f in figures if f["path"] == "MegatronStrategy" and f.get("of_bare")]
    takeaway = (
        f"``MegatronStrategy`` is {min(ratios):.2f} to {max(ratios):.2f} × as fast as the bare loop at the same level."
    )
    table = simple_table(
        ("Level", "path", "GPUs", "tokens/s a GPU", "of the bare loop", "ms a step: median (min – max)", "peak GiB"),
        [
            (
                called(f["level"]),
                f["path"],
                str(f["gpus"]),
                *(
                    (
                        f"{f['tokens_per_s_per_gpu']:,}",
                        f"{f['of_bare']:.3f}" if f["of_bare"] else "–",
                        milliseconds(f, 1),
                        f"{f['peak_gib']:.1f}",
                    )
                    if "ms" in f
                    else (failure(f), "–", "–", "–")
                ),
            )
            for f in figures
        ],
    )
    return block(takeaway, table, origin(origins, "megatron-core"))


def megatron_parity() -> str:
    """Losses of Megatron-core's layouts, from megatron_parity_h200.jsonl."""
    origins, figures = read(_PARITY)
    first = min(f["init_seed"] for f in figures)
    takeaway = (
        f"The mean training loss of ten steps departs from that of the transformers path by at most "
        f"{_furthest(figures, first)} (from any of the initial weights: {_furthest(figures)})."
    )
    table = simple_table(
        (
            "Level", "run", "GPUs", "validation loss", "beside transformers",
            "training loss: furthest from transformers", "from transformers, fused", "steps skipped",
        ),
        [
            (
                called(f["level"]),
                f["layout"],
                str(f["gpus"]),
                f"{f['val_loss']:.4f}",
                f"{_distance(figures, f):+.4f}",
                f"{f['furthest']:.4f}",
                f"{f['furthest_from_fused']:.4f}" if "furthest_from_fused" in f else "–",
                str(len(f["skipped"])),
            )
            for f in _in_order(figures)
            if f["init_seed"] == first
        ],
    )  # fmt: skip
    return block(takeaway, table, origin(origins, "megatron-core"))


def _furthest(figures: list[dict[str, Any]], seed: int | None = None) -> str:
    """Distances of training losses from the transformers path's: with GEMMs in half precision, and in FP8."""
    chosen = [f for f in figures if seed in (None, f["init_seed"])]
    half = max(f["furthest"] for f in chosen if f["level"] == "bf16_mixed")
    fp8 = max(f["furthest"] for f in chosen if f["level"] != "bf16_mixed")
    return f"{half:.4f} at ``bf16_mixed`` and {fp8:.4f} where GEMMs run in FP8"


def _by_seed() -> dict[tuple[str, str], dict[int, float]]:
    """Distances in validation loss by level, run and seed, of the runs that were trained from all initial weights."""
    figures = _in_order(read(_PARITY)[1])
    seeds = {f["init_seed"] for f in figures}
    found: dict[tuple[str, str], dict[int, float]] = {}
    for f in figures:
        if f["layout"] != "transformers":
            found.setdefault((f["level"], f["layout"]), {})[f["init_seed"]] = _distance(figures, f)
    return {run: of for run, of in found.items() if set(of) == seeds}


def megatron_seeds() -> str:
    """Validation losses beside transformers' by initial weights, and their mean."""
    found = _by_seed()
    seeds = list(next(iter(found.values())))
    means = {run: statistics.mean(of.values()) for run, of in found.items()}
    takeaway = (
        f"The validation loss less that of the transformers path lies, in the mean over {len(seeds)} sets of initial "
        f"weights, between {min(means.values()):+.4f} and {max(means.values()):+.4f}."
    )
    rows = [
        (called(level), layout, *(f"{d:+.4f}" for d in (*of.values(), means[level, layout])))
        for (level, layout), of in found.items()
    ]
    return block(takeaway, simple_table(("Level", "run", *(f"seed {seed}" for seed in seeds), "mean"), rows))


def _in_order(figures: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Sorted by level, run and seed, which may have been trained in any order."""
    levels = list(dict.fromkeys(f["level"] for f in figures))
    return sorted(figures, key=lambda f: (levels.index(f["level"]), list(LAYOUTS).index(f["layout"]), f["init_seed"]))


def _distance(figures: list[dict[str, Any]], figure: dict[str, Any]) -> float:
    """Its validation loss less that of transformers' path at the same level and seed."""
    return figure["val_loss"] - _base(figures, figure["level"], figure["init_seed"])["val_loss"]


def _base(figures: list[dict[str, Any]], level: str, seed: int) -> dict[str, Any]:
    return next(f for f in figures if (f["level"], f["layout"], f["init_seed"]) == (level, "transformers", seed))


def parity_picture() -> Picture:
    """How far the training losses of the runs on two GPUs are from the transformers path's, where GEMMs run in FP8."""
    figures = _in_order(read(_PARITY)[1])
    first = min(f["init_seed"] for f in figures)
    levels = [level for level in dict.fromkeys(f["level"] for f in figures) if level != "bf16_mixed"]
    colours = dict(zip(_DRAWN, LINES, strict=False))
    drawn = [f for f in figures if f["init_seed"] == first and f["layout"] in _DRAWN]
    limit = round(1.1 * max(f["furthest"] for f in drawn), 4)
    panels = []
    for level in levels:
        base, lines = smoothed(_base(figures, level, first)["train_loss"]), []
        for f in drawn:
            if f["level"] == level:
                ys = tuple(a - b for a, b in zip(smoothed(f["train_loss"]), base, strict=True))
                lines.append(Line(_DRAWN[f["layout"]], ys, colours[f["layout"]]))
        xs = tuple(10.0 * (i + 1) for i in range(len(base)))
        panels.append(Panel(called(level).strip("`"), "nats a token", xs, tuple(lines), limit))
    furthest = {level: max(f["furthest"] for f in drawn if f["level"] == level) for level in ("bf16_mixed", *levels)}
    said = ", ".join(f"{d:.4f} at {called(level)}" for level, d in furthest.items())
    see = f"The training losses of the layouts depart from that of the transformers path by at most {said}."
    shown = (
        f"Lines: the mean of ten steps less that of the transformers path, from the weights of seed {first}, where "
        "GEMMs run in FP8; on two GPUs, but for that with fused matrices. Megatron-core on one GPU is in the next "
        "picture."
    )
    alt = f"Lines of the distance in training loss from the transformers path over steps. Furthest: {said}".replace(
        "`", ""
    )
    return Picture("megatron_parity_h200.png", see, shown, Lines("step", tuple(panels), alt, sharey=True))


def seeds_picture() -> Picture:
    """Distances in validation loss by initial weights."""
    found = {f"{called(level).strip('`')},\n{_IN_WORDS[layout]}": of for (level, layout), of in _by_seed().items()}
    seeds = len(next(iter(found.values())))

    def between(layout: str) -> str:
        apart = [d for (_, run), of in _by_seed().items() if run == layout for d in of.values()]
        return f"between {min(apart):+.4f} and {max(apart):+.4f}"

    see = (
        f"Megatron-core's validation loss less that of the transformers path lies {between('TP1')}, and that of the "
        f"transformers path with fused matrices {between('transformers, fused')}."
    )
    xlabel = "validation loss less that of the transformers path"
    means = "; ".join(f"{name} {statistics.mean(of.values()):+.4f}" for name, of in found.items()).replace("\n", " ")
    shown = f"Rows: every run that was trained from all {seeds} sets of initial weights, on one GPU."
    return Picture("megatron_seeds_h200.png", see, shown, Dots(xlabel, found, f"Dots of {xlabel}. Means: {means}"))

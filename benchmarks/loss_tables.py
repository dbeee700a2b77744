"""Tables and pictures of losses and accuracies beside those of other levels."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from typing import Any

from benchmarks.loss_parity import BASELINE
from benchmarks.pictures import LINES, OTHERS, Dots, Line, Lines, Panel, Picture
from benchmarks.record import RESULTS, read
from benchmarks.rst import block, origin, simple_table
from nemo_lowprec.chart import CHART

__all__ = ["curves_picture", "image_parity", "losses", "msamp_picture", "others_picture", "parity", "trained"]

_FILE = RESULTS / "loss_parity_h200.jsonl"
_MSAMP = ("msamp_o1", "msamp_o2", "msamp_o3")


def losses() -> dict[str, dict[str, Any]]:
    """The summary of each level, with options behind a plus sign, in the chart's order."""
    return {f["level"]: f for f in _in_order(f for f in read(_FILE)[1] if f["benchmark"] == "loss_parity_summary")}


def trained() -> dict[str, Any]:
    """The record of one run, for the settings that all runs share."""
    return next(f for f in read(_FILE)[1] if f["benchmark"] == "loss_parity")


def _in_order(figures: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """The figures sorted in the chart's order; a level with options comes after the level."""
    return sorted(figures, key=lambda f: (list(CHART).index(f["level"].partition("+")[0]), f["level"]))


def parity() -> str:
    """Validation loss beside bf16_mixed."""
    found = losses()
    gaps = [f["gap_percent_mean"] for level, f in found.items() if level != BASELINE]
    takeaway = (
        f"The mean validation losses of the other {len(gaps)} rows lie between {min(gaps):+.2f} % and "
        f"{max(gaps):+.2f} % of ``{BASELINE}``'s, whose own seeds lie {found[BASELINE]['seed_spread_percent']:.2f} % "
        "apart."
    )
    table = simple_table(
        ("Level", "seeds", "validation loss", "gap to bf16_mixed, %: mean (by seed)", "spread of its seeds, %"),
        [
            (
                f"``{level}``",
                str(f["seeds"]),
                f"{f['val_loss_mean']:.4f}",
                f"{f['gap_percent_mean']:+.2f} ({', '.join(f'{gap:+.2f}' for gap in f['gap_percent'])})",
                f"{f['seed_spread_percent']:.2f}",
            )
            for level, f in found.items()
        ],
    )
    return block(takeaway, table, origin(read(_FILE)[0]))


def image_parity() -> str:
    """Accuracy on images, from image_parity_h200.jsonl."""
    origins, figures = read(RESULTS / "image_parity_h200.jsonl")
    runs = [f for f in figures if f["benchmark"] == "image_parity" and "accuracy" in f]
    found = _in_order(f for f in figures if f["benchmark"] == "image_parity_summary")
    means = [100 * f["accuracy_mean"] for f in found]
    takeaway = (
        f"Mean accuracies lie between {min(means):.2f} % and {max(means):.2f} %, and the seeds of one level up to "
        f"{100 * max(f['accuracy_spread'] for f in found):.2f} points apart."
    )
    rows = []
    for f in found:
        by_seed = ", ".join(f"{100 * r['accuracy']:.2f}" for r in runs if r["level"] == f["level"])
        rows.append(
            (
                f"``{f['level']}``",
                str(f["seeds"]),
                f"{100 * f['accuracy_mean']:.2f} ({by_seed})",
                f"{100 * f['accuracy_spread']:.2f}",
                f"{f['loss_mean']:.4f}",
                f"{f['loss_spread']:.4f}",
            )
        )
    header = ("Level", "seeds", "test accuracy, %: mean (by seed)", "spread", "test loss", "its spread")
    return block(takeaway, simple_table(header, rows), origin(origins, "timm"))


def _runs() -> dict[str, dict[int, dict[str, Any]]]:
    """Runs by level and seed."""
    runs: dict[str, dict[int, dict[str, Any]]] = {}
    for f in _in_order(f for f in read(_FILE)[1] if f["benchmark"] == "loss_parity"):
        runs.setdefault(f["level"], {})[f["seed"]] = f
    return runs


def curves_picture() -> Picture:
    """Training losses of the MS-AMP levels and of the baseline, means over seeds, and their distance."""
    runs = _runs()
    curves = {
        level: [statistics.mean(at) for at in zip(*(f["train_loss"] for f in runs[level].values()), strict=True)]
        for level in (BASELINE, *_MSAMP)
    }
    every = next(iter(runs[BASELINE].values()))["every"]
    xs = tuple(float(every * (i + 1)) for i in range(len(curves[BASELINE])))
    colours = dict(zip(_MSAMP, LINES, strict=False))
    apart = {
        level: tuple(a - b for a, b in zip(curves[level], curves[BASELINE], strict=True)) for level in _MSAMP
    }  # fmt: skip
    furthest = max(abs(d) for of in apart.values() for d in of)
    lines = [Line(BASELINE, tuple(curves[BASELINE]), OTHERS, behind=True)]
    lines += [Line(level, tuple(curves[level]), colours[level]) for level in _MSAMP]
    distances = tuple(Line(level, apart[level], colours[level]) for level in _MSAMP)
    see = (
        f"The training losses of MS-AMP's levels stay within {furthest:.3f} of that of ``{BASELINE}``, which ends at "
        f"{curves[BASELINE][-1]:.3f}."
    )
    shown = (
        f"Lines: MS-AMP's levels and ``{BASELINE}``, means over {len(runs[BASELINE])} seeds of the loss of every "
        f"{every}th step; the final losses of all levels follow."
    )
    alt = (
        f"Left: training loss over steps, four curves on each other, of {BASELINE} and MS-AMP's levels. Right: their "
        f"distance from {BASELINE}, within {furthest:.3f} of zero."
    )
    panels = (
        Panel("Training loss", "nats a token", xs, tuple(lines)),
        Panel(f"Less that of {BASELINE}", "", xs, distances, limit=round(1.1 * furthest, 3)),
    )
    return Picture("loss_curves_h200.png", see, shown, Lines("step", panels, alt))


def _dots(file: str, see: str, shown: str, levels: list[str]) -> Picture:
    runs = _runs()
    base = {seed: f["val_loss"] for seed, f in runs[BASELINE].items()}
    rows = {
        level: {seed: (f["val_loss"] / base[seed] - 1) * 100 for seed, f in runs[level].items()} for level in levels
    }
    half = losses()[BASELINE]["seed_spread_percent"] / 2
    xlabel = f"validation loss against {BASELINE} of the same seed, %"
    means = "; ".join(f"{level} {statistics.mean(row.values()):+.2f} %" for level, row in rows.items())
    alt = f"Dots of {xlabel}, one a seed. Means: {means}"
    return Picture(file, see, shown, Dots(xlabel, rows, alt, (half, f"spread of {BASELINE}'s seeds")))


def _means(levels: list[str]) -> str:
    means = [losses()[level]["gap_percent_mean"] for level in levels]
    return f"{min(means):+.2f} % and {max(means):+.2f} %"


def msamp_picture() -> Picture:
    """Final losses of the MS-AMP levels and their options."""
    levels = [level for level in losses() if level.startswith("msamp")]
    see = f"The means (black strokes) of MS-AMP's levels and options lie between {_means(levels)}."
    shown = "Rows: every run of MS-AMP's levels; the next picture has the other levels."
    return _dots("loss_parity_h200.png", see, shown, levels)


def others_picture() -> Picture:
    """Final losses of the other levels."""
    levels = [level for level in losses() if not level.startswith("msamp") and level != BASELINE]
    see = f"The means of the levels with FP32 masters or weights lie between {_means(levels)}."
    return _dots("loss_parity_others_h200.png", see, "Rows: every other level and option of the table below.", levels)

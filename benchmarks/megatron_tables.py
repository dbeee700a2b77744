"""Tables and a picture of what Megatron-core does with the levels."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

from benchmarks.megatron_parity import LAYOUTS, smoothed
from benchmarks.megatron_step import LEVELS
from benchmarks.record import RESULTS, read
from benchmarks.rst import failure, milliseconds, origin, rst_table

__all__ = ["megatron_headlines", "megatron_parity", "megatron_picture", "megatron_seeds", "megatron_step"]

_STEP, _PARITY = RESULTS / "megatron_step_h200.jsonl", RESULTS / "megatron_parity_h200.jsonl"


_OPTIONS = {"": "", "fp16": '(half="fp16")', "fp8_params": "(fp8_params=True)"}


def _called(name: str) -> str:
    """A level's call, of a name such as ``msamp_o2+fp16``."""
    level, _, variant = name.partition("+")
    return f"``{level}{_OPTIONS[variant]}``"


def megatron_headlines() -> list[tuple[str, str, str, str]]:
    """Rows for the table of what there is to see first."""
    steps = {(f["level"], f["path"]): f for f in read(_STEP)[1] if f["gpus"] == 1 and "ms" in f}
    whole = "{tokens_per_s_per_gpu:,} tokens/s, {ms:.1f} ms, {peak_gib:.1f} GiB".format
    rows = []
    for level, other in (
        ("bf16_with_fp8_mixed", "bf16_with_fp8_mixed"),
        ("bf16_with_fp8_mixed+fp8_params", "bf16_with_fp8_mixed+fp8_params"),
        ("msamp_o2+fp16", "bf16_with_fp8_mixed"),
    ):
        ours, bare = steps[level, "MegatronStrategy"], steps[other, "bare loop"]
        rows.append(
            (
                "Whole step on Megatron-core, Llama-8B-shaped GPTModel",
                f"{_called(level)}: {whole(**ours)}",
                f"a bare Megatron-core loop, {_called(other)}: {whole(**bare)}",
                f"{bare['ms'] / ours['ms']:.3f} × as fast",
            )
        )
    return rows


def megatron_step() -> str:
    """Whole steps on Megatron-core, from megatron_step_h200.jsonl."""
    origins, figures = read(_STEP)
    figures.sort(key=lambda f: (f["gpus"], LEVELS.index(f["level"])))  # levels may have been measured in any order
    table = rst_table(
        ("Level", "path", "GPUs", "tokens/s a GPU", "of the bare loop", "ms a step: median (min – max)", "peak GiB"),
        [
            (
                _called(f["level"]),
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
    return f"{origin(origins, 'megatron-core')}\n\n{table}"


def megatron_parity() -> str:
    """Losses of Megatron-core's layouts, from megatron_parity_h200.jsonl."""
    origins, figures = read(_PARITY)
    first = min(f["init_seed"] for f in figures)
    table = rst_table(
        (
            "Level", "run", "GPUs", "validation loss", "beside transformers",
            "training loss: furthest from transformers", "from transformers, fused", "steps skipped",
        ),
        [
            (
                _called(f["level"]),
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
    return f"{origin(origins, 'megatron-core')}\n\n{table}"


def megatron_seeds() -> str:
    """Validation losses beside transformers' by initial weights, and their mean."""
    figures = _in_order(read(_PARITY)[1])
    seeds = sorted({f["init_seed"] for f in figures})
    runs: dict[tuple[str, str], dict[int, dict[str, Any]]] = {}
    for f in figures:
        runs.setdefault((f["level"], f["layout"]), {})[f["init_seed"]] = f
    names, rows = [f"seed {seed}" for seed in seeds], []
    for (level, layout), of in runs.items():
        if layout == "transformers" or len(of) < len(seeds):
            continue
        distances = [_distance(figures, of[seed]) for seed in seeds]
        distances.append(statistics.mean(distances))
        rows.append((_called(level), layout, *(f"{distance:+.4f}" for distance in distances)))
    return rst_table(("Level", "run", *names, "mean"), rows)


def _in_order(figures: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Sorted by level, run and seed, which may have been trained in any order."""
    levels = list(dict.fromkeys(f["level"] for f in figures))
    return sorted(figures, key=lambda f: (levels.index(f["level"]), list(LAYOUTS).index(f["layout"]), f["init_seed"]))


def _distance(figures: list[dict[str, Any]], figure: dict[str, Any]) -> float:
    """Its validation loss less that of transformers' path at the same level and seed."""
    return figure["val_loss"] - _base(figures, figure["level"], figure["init_seed"])["val_loss"]


def _base(figures: list[dict[str, Any]], level: str, seed: int) -> dict[str, Any]:
    return next(f for f in figures if (f["level"], f["layout"], f["init_seed"]) == (level, "transformers", seed))


def megatron_picture(path: Path) -> None:
    """Training losses, and how far each layout's is from that of transformers' path, by initial weights."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figures = _in_order(read(_PARITY)[1])
    levels = list(dict.fromkeys(f["level"] for f in figures))
    seeds = sorted({f["init_seed"] for f in figures})
    rows, limit = 1 + len(seeds), 1.05 * max(f["furthest"] for f in figures)
    figure, axes = plt.subplots(
        rows, len(levels), figsize=(4 * len(levels), 2.2 * rows), sharex=True, sharey="row", squeeze=False
    )
    colors = {layout: f"C{i}" for i, layout in enumerate(LAYOUTS)}
    for f in figures:
        column, row, losses = levels.index(f["level"]), 1 + seeds.index(f["init_seed"]), smoothed(f["train_loss"])
        steps = [10 * (i + 1) for i in range(len(losses))]
        base = smoothed(_base(figures, f["level"], f["init_seed"])["train_loss"])
        look = {"color": colors[f["layout"]], "linewidth": 1}
        if row == 1:
            axes[0][column].plot(steps, losses, label=f["layout"], **look)
        axes[row][column].plot(steps, [a - b for a, b in zip(losses, base, strict=True)], **look)
    for column, level in enumerate(levels):
        axes[0][column].set_title(level, fontsize=10)
        axes[-1][column].set_xlabel("step")
    axes[0][0].set_ylabel("training loss,\nmean of ten steps")
    for row, seed in enumerate(seeds):
        axes[1 + row][0].set_ylim(-limit, limit)
        axes[1 + row][0].set_ylabel(f"from transformers\n(weights of seed {seed})")
    axes[0][0].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)

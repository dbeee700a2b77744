"""Tables and a picture of what Megatron-core does with the levels."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.megatron_parity import smoothed
from benchmarks.megatron_step import LEVELS
from benchmarks.record import RESULTS, read
from benchmarks.rst import failure, milliseconds, origin, rst_table

__all__ = ["megatron_headlines", "megatron_parity", "megatron_picture", "megatron_step"]

_STEP, _PARITY = RESULTS / "megatron_step_h200.jsonl", RESULTS / "megatron_parity_h200.jsonl"


_OPTIONS = {"": "", "fp16": '(half="fp16")', "fp8_params": "(fp8_params=True)"}


def _called(name: str) -> str:
    """A level's call, of a name such as ``msamp_o2+fp16``."""
    level, _, variant = name.partition("+")
    return f"``{level}{_OPTIONS[variant]}``"


def megatron_headlines() -> list[tuple[str, str, str, str]]:
    """Rows for the table of what there is to see first."""
    steps = {(f["level"], f["path"]): f for f in read(_STEP)[1] if f["gpus"] == 1 and "ms" in f}
    whole = "{tokens_per_s_per_gpu:,} tokens/s, {peak_gib:.1f} GiB".format
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
    table = rst_table(
        ("Level", "run", "GPUs", "validation loss", "beside transformers", "training loss: furthest from transformers"),
        [
            (
                _called(f["level"]),
                f["layout"],
                str(f["gpus"]),
                f"{f['val_loss']:.4f}",
                f"{f['val_loss'] - base['val_loss']:+.4f}",
                f"{f['furthest']:.4f}",
            )
            for f in figures
            for base in [_base(figures, f["level"])]
        ],
    )
    return f"{origin(origins, 'megatron-core')}\n\n{table}"


def _base(figures: list[dict[str, Any]], level: str) -> dict[str, Any]:
    return next(f for f in figures if (f["level"], f["layout"]) == (level, "transformers"))


def megatron_picture(path: Path) -> None:
    """Training losses, and how far each layout's is from that of transformers' path."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figures = read(_PARITY)[1]
    levels = list(dict.fromkeys(f["level"] for f in figures))
    figure, axes = plt.subplots(2, len(levels), figsize=(4 * len(levels), 6), sharex=True, sharey="row", squeeze=False)
    for column, level in enumerate(levels):
        base = smoothed(_base(figures, level)["train_loss"])
        for f in (f for f in figures if f["level"] == level):
            losses = smoothed(f["train_loss"])
            steps = [10 * (i + 1) for i in range(len(losses))]
            axes[0][column].plot(steps, losses, label=f["layout"], linewidth=1)
            axes[1][column].plot(steps, [a - b for a, b in zip(losses, base, strict=True)], linewidth=1)
        axes[0][column].set_title(level, fontsize=10)
        axes[1][column].set_xlabel("step")
    axes[0][0].set_ylabel("training loss, mean of ten steps")
    axes[1][0].set_ylabel("distance from\ntransformers")
    axes[0][0].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)

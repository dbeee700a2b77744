"""The documents' tables of measurements, made from benchmarks/results/: ``python -m benchmarks.tables`` prints them.

``python -m benchmarks.tables --write`` puts them into README.rst and docs/measured.rst, between the comments that name
them, and draws the pictures.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.fault_tables import faults
from benchmarks.levels import HOPPER
from benchmarks.megatron_tables import (
    megatron_headlines,
    megatron_parity,
    megatron_picture,
    megatron_seeds,
    megatron_step,
)
from benchmarks.parallel_tables import (
    gradient_sync,
    parallel_headlines,
    parallel_parity,
    parallel_picture,
    parallel_step,
)
from benchmarks.record import RESULTS, read
from benchmarks.rst import failure, milliseconds, origin, rst_table
from nemo_lowprec.chart import CHART, COLUMNS

_ROOT = Path(__file__).parent.parent
DOCUMENTS = (_ROOT / "README.rst", _ROOT / "docs" / "measured.rst")


def chart() -> str:
    """The precision chart, without the rows that no run has shown."""
    rows = [CHART[name] for name in HOPPER]
    return rst_table(COLUMNS, [[f"``{r.name}``", *list(r.columns().values())[1:]] for r in rows])


def headlines() -> str:
    """What there is to see first: the best of each file of results beside what it is measured against."""
    return rst_table(("Figure", "nemo_lowprec", "beside", "ratio"), headline_rows())


def headline_rows() -> list[tuple[str, str, str, str]]:
    """The rows of that table: both sides with their settings, and a ratio where these are the same."""

    def of(file: str, key: str = "name") -> dict[str, dict[str, Any]]:
        return {f[key]: f for f in read(RESULTS / f"{file}_h200.jsonl")[1] if f.get(key)}

    optimizers = of("optimizer_step")
    te_name = "lightning TransformerEnginePrecision, bf16 weights, no masters"
    steps = of("train_step_passes")
    pairs = [
        (
            "cuDNN attention, head in FP8",
            steps["nemo_lowprec msamp_o2, cuDNN attention, FP8 head"],
            "cuDNN attention, head in FP8",
            steps[f"{te_name}, cuDNN attention"],
        )
    ]
    steps = of("train_step")
    pairs.append(
        (
            "torch's attention, head in BF16",
            steps["nemo_lowprec msamp_o2"],
            "torch's attention, head in FP8",
            steps[te_name],
        )
    )
    (adam,) = (f for name, f in optimizers.items() if name.startswith("nemo_lowprec O2:"))
    te_adam = optimizers["TE FusedAdam, FP16 weights and masters, FP8+FP16 states"]
    whole = "{tokens_per_s:,} tokens/s, {ms:.1f} ms, {peak_gib:.1f} GiB".format
    rows = [
        (
            "Whole step, Llama-8B-shaped",
            f"``msamp_o2``, {own}: {whole(**step)}",
            f"Lightning's TransformerEnginePrecision, BF16 weights and states, {its}: {whole(**te)}",
            f"{te['ms'] / step['ms']:.3f} × as fast",
        )
        for own, step, its, te in pairs
    ]
    rows += [
        (
            "Adam's step, 1.1 B parameters",
            f"``msamp_o2``: {adam['ms']:.2f} ms, {100 * adam['of_copy']:.0f} % of copy bandwidth, no temporaries",
            f"TE FusedAdam, the same states: {te_adam['ms']:.1f} ms, "
            f"{te_adam['temporaries_bytes_per_param']:.0f} bytes a parameter of temporaries",
            f"{te_adam['ms'] / adam['ms']:.0f} × as fast",
        ),
    ]
    vision = read(RESULTS / "memory_h200.jsonl")[1]
    for model in dict.fromkeys(f["model"] for f in vision):
        peak = {f["level"]: f for f in vision if f["model"] == model}
        o2, amp = peak["msamp_o2"], peak["fp16_amp"]
        rows.append(
            (
                f"Peak memory, {model}, batch {o2['batch']}",
                f"``msamp_o2``: {o2['peak_allocated_mb']:,} MB, {o2['ms']:.0f} ms a step",
                f"``fp16_amp``: {amp['peak_allocated_mb']:,} MB, {amp['ms']:.0f} ms a step",
                f"{o2['saved_percent']:.1f} % saved, {o2['ms'] / amp['ms']:.2f} × the time",
            )
        )
    large = of("llama_8b", "level")
    rows.append(
        (
            "Llama-3-8B, all parameters, sequence 8192, one GPU",
            "``msamp_o2``: {tokens_per_s:,} tokens/s, {peak_gib:.1f} GiB".format(**large["msamp_o2"]),
            f"``bf16_mixed``: {failure(large['bf16_mixed'])}",
            "–",
        )
    )
    losses = {
        f["level"]: f for f in read(RESULTS / "loss_parity_h200.jsonl")[1] if f["benchmark"] == "loss_parity_summary"
    }
    gaps = ", ".join(f"``{n}`` {losses[n]['gap_percent_mean']:+.2f} %" for n in ("msamp_o1", "msamp_o2", "msamp_o3"))
    base = losses["bf16_mixed"]
    rows.append(
        (
            f"Validation loss, Llama of 100M parameters, {base['seeds']} seeds",
            gaps,
            f"``bf16_mixed``: {base['val_loss_mean']:.3f}, its seeds {base['seed_spread_percent']:.2f} % apart",
            "–",
        )
    )
    return rows + parallel_headlines() + megatron_headlines()


def throughput(file: str = "train_step_h200.jsonl") -> str:
    """Whole training steps, from the file."""
    origins, figures = read(RESULTS / file)
    rows = sorted((f for f in figures if "tokens_per_s" in f), key=lambda f: -f["tokens_per_s"])
    table = rst_table(
        ("Contestant", "tokens/s", "ms a step: median (min – max)", "peak GiB"),
        [(f["name"], f"{f['tokens_per_s']:,}", milliseconds(f, 1), f"{f['peak_gib']:.1f}") for f in rows],
    )
    return f"{origin(origins)}\n\n{table}"


def _in_order(figures: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """In the chart's order; a level with options after the level."""
    return sorted(figures, key=lambda f: (list(CHART).index(f["level"].partition("+")[0]), f["level"]))


def parity() -> str:
    """Validation loss beside bf16_mixed, from loss_parity_h200.jsonl."""
    origins, figures = read(RESULTS / "loss_parity_h200.jsonl")
    rows = _in_order(f for f in figures if f["benchmark"] == "loss_parity_summary")
    table = rst_table(
        ("Level", "seeds", "validation loss", "gap to bf16_mixed, %: mean (by seed)", "spread of its seeds, %"),
        [
            (
                f"``{f['level']}``",
                str(f["seeds"]),
                f"{f['val_loss_mean']:.4f}",
                f"{f['gap_percent_mean']:+.2f} ({', '.join(f'{gap:+.2f}' for gap in f['gap_percent'])})",
                f"{f['seed_spread_percent']:.2f}",
            )
            for f in rows
        ],
    )
    return f"{origin(origins)}\n\n{table}"


def backends() -> str:
    """Errors of the backends' GEMMs and speed of their casts, from backends_h200.jsonl."""
    origins, figures = read(RESULTS / "backends_h200.jsonl")
    cells: dict[tuple[str, str], dict[str, dict]] = {}
    for f in figures:
        if "to_float64" in f:
            cells.setdefault((f["scaling"], f["backend"]), {})[f["gemm"]] = f
    times = {(f.get("scaling"), f["backend"]): f"{f['ms']:.2f}" for f in figures if f["benchmark"] == "backends_time"}
    rows: list[tuple[str, ...]] = [("none: BF16", "torch", "–", "–", "–", times[None, "bf16"])]
    for (scaling, backend), gemms in cells.items():
        errors = (f"{100 * g['to_float64']:.2f} ({100 * g['to_reference']:.3f})" for g in gemms.values())
        rows.append((scaling, backend, *errors, times.get((scaling, backend), "–")))
    table = rst_table(("Scaling", "Backend", "fprop", "dgrad", "wgrad", "ms at Llama-8B's MLP"), rows)
    casts = rst_table(
        ("Quantization in both orientations", "Operand", "GB/s: median (min – max)"),
        [
            (f["name"], f"{f['operand']}, {f['shape']}", f"{f['gb_per_s']} ({f['gb_per_s_min']} – {f['gb_per_s_max']})")
            for f in figures
            if f["benchmark"] == "backends_cast"
        ],
    )
    return f"{origin(origins)}\n\n{table}\n\n{casts}"


def optimizer_step() -> str:
    """The optimizer's step alone, from optimizer_step_h200.jsonl."""
    origins, figures = read(RESULTS / "optimizer_step_h200.jsonl")
    by_benchmark = {f["benchmark"]: f for f in figures}
    shapes, copy = by_benchmark["optimizer_step_shapes"], by_benchmark["optimizer_step_copy"]
    table = rst_table(
        (
            "Optimizer", "ms: median (min – max)", "bytes moved/param", "GB/s", "of copy bandwidth, %",
            "state bytes/param", "temporaries bytes/param",
        ),
        [
            (
                f["name"],
                milliseconds(f, 2),
                f"{f['bytes_per_param']:.2f}",
                f"{f['gb_per_s']:,}",
                f"{100 * f['of_copy']:.1f}",
                f"{f['state_bytes_per_param']:.2f}",
                f"{f['temporaries_bytes_per_param']:.2f}",
            )
            for f in figures
            if "of_copy" in f
        ],
    )  # fmt: skip
    about = f"{shapes['parameters']:,} parameters in {shapes['tensors']} tensors; copy: {copy['gb_per_s']:,} GB/s."
    return f"{origin(origins, 'torchao')}\n\n{about}\n\n{table}"


def memory() -> str:
    """Peak memory of two vision models, from memory_h200.jsonl."""
    origins, figures = read(RESULTS / "memory_h200.jsonl")
    columns = ("weights", "masters", "gradients", "states", "rest")
    table = rst_table(
        ("Model, batch", "Level", "peak MB", "saved, %", *columns, "reserved MB", "ms a step"),
        [
            (
                f"{f['model']}, {f['batch']}",
                f"``{f['level']}``",
                f"{f['peak_allocated_mb']:,}",
                "–" if f["saved_percent"] is None else f"{f['saved_percent']:.1f}",
                *(f"{f['mb_at_peak'][c]:,.0f}" for c in columns),
                f"{f['peak_reserved_mb']:,}",
                f"{f['ms']:.1f}",
            )
            for f in figures
            if "ms" in f
        ],
    )
    return f"{origin(origins, 'timm')}\n\n{table}"


def llama_8b() -> str:
    """Llama-3-8B on one GPU, from llama_8b_h200.jsonl."""
    origins, figures = read(RESULTS / "llama_8b_h200.jsonl")
    rows = []
    for f in figures:
        if "error" in f:
            rows.append((f"``{f['level']}``", failure(f), "–", "–", "–"))
        else:
            sizes = (f"{f[key]:.1f}" for key in ("peak_gib", "peak_reserved_gib", "setup_peak_gib"))
            rows.append((f"``{f['level']}``", f"{f['tokens_per_s']:,}", *sizes))
    table = rst_table(("Level", "tokens/s", "peak GiB", "reserved GiB", "GiB while setting up"), rows)
    return f"{origin(origins)}\n\n{table}"


def image_parity() -> str:
    """Accuracy on images, from image_parity_h200.jsonl."""
    origins, figures = read(RESULTS / "image_parity_h200.jsonl")
    runs = [f for f in figures if f["benchmark"] == "image_parity" and "accuracy" in f]
    rows = []
    for f in _in_order(f for f in figures if f["benchmark"] == "image_parity_summary"):
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
    return f"{origin(origins, 'timm')}\n\n{rst_table(header, rows)}"


def throughput_picture(path: Path) -> None:
    """Tokens/s by contestant: ours, and the others."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    origins, figures = read(RESULTS / "train_step_h200.jsonl")
    rows = sorted((f for f in figures if "tokens_per_s" in f), key=lambda f: f["tokens_per_s"])
    figure, axes = plt.subplots(figsize=(11, 0.34 * len(rows) + 1.2))
    colors = ["#76b900" if f["name"].startswith("nemo_lowprec") else "#8899aa" for f in rows]
    bars = axes.barh(
        [f["name"].removeprefix("nemo_lowprec ") for f in rows], [f["tokens_per_s"] for f in rows], color=colors
    )
    axes.bar_label(bars, [f"{f['tokens_per_s']:,}  ({f['peak_gib']:.0f} GiB)" for f in rows], padding=3, fontsize=8)
    axes.set(
        xlabel=f"tokens/s of whole training steps, Llama-8B-shaped, {origins[0]['gpu']}", title="green: this project"
    )
    axes.margins(y=0.01)
    axes.set_xlim(right=1.2 * rows[-1]["tokens_per_s"])
    axes.tick_params(axis="y", labelsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


TABLES: dict[str, Callable[[], str]] = {
    "chart": chart,
    "headlines": headlines,
    "throughput": throughput,
    "throughput_passes": partial(throughput, "train_step_passes_h200.jsonl"),
    "parity": parity,
    "backends": backends,
    "optimizer_step": optimizer_step,
    "memory": memory,
    "llama_8b": llama_8b,
    "image_parity": image_parity,
    "gradient_sync": gradient_sync,
    "parallel_step": parallel_step,
    "parallel_parity": parallel_parity,
    "megatron_step": megatron_step,
    "megatron_parity": megatron_parity,
    "megatron_seeds": megatron_seeds,
    "faults": faults,
}


def fill(text: str) -> str:
    """``text`` with every block ``.. NAME begins`` to ``.. NAME ends`` made anew."""
    for name, make in TABLES.items():
        block = rf"(?s)(\.\. {name} begins\n\n).*?(\n\n\.\. {name} ends)"
        text = re.sub(block, lambda m, make=make: m[1] + make() + m[2], text)  # type: ignore[misc]
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--write", action="store_true", help="put the tables into the documents")
    if parser.parse_args().write:
        for document in DOCUMENTS:
            document.write_text(fill(document.read_text()))
        throughput_picture(RESULTS / "train_step_h200.png")
        parallel_picture(RESULTS / "parallel_step_h200.png")
        megatron_picture(RESULTS / "megatron_parity_h200.png")
        return
    for make in TABLES.values():
        try:
            print(make(), end="\n\n")
        except FileNotFoundError as missing:
            print(f"No {Path(missing.filename).name} yet.", end="\n\n")


if __name__ == "__main__":
    main()

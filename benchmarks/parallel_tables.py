"""Tables and a picture of what several GPUs do together."""

from __future__ import annotations

from pathlib import Path

from benchmarks.record import RESULTS, read
from benchmarks.rst import milliseconds, origin, rst_table
from nemo_lowprec.comm.cut import BUCKET_BYTES

__all__ = ["gradient_sync", "parallel_headlines", "parallel_parity", "parallel_picture", "parallel_step"]

OTHERS = ("lightning", "torchao")  # with which the names of contestants that are not ours begin


def parallel_headlines() -> list[tuple[str, str, str, str]]:
    """Rows for the table of what there is to see first."""
    means = {(f["gpus"], f["contestant"]): f for f in read(RESULTS / "gradient_sync_h200.jsonl")[1]}
    rows = []
    for gpus in sorted({gpus for gpus, _ in means}):
        fp8, bf16 = means[gpus, f"fp8, buckets of {BUCKET_BYTES >> 20} MiB"], means[gpus, "bf16 all_reduce"]
        rows.append(
            (
                f"268 M gradients averaged over {gpus} GPUs",
                f"FP8, with quantization: {fp8['ms']:.2f} ms",
                f"BF16 all_reduce of NCCL: {bf16['ms']:.2f} ms",
                f"{bf16['ms'] / fp8['ms']:.2f} × as fast",
            )
        )
    steps = {(f["gpus"], f["name"]): f for f in read(RESULTS / "parallel_step_h200.jsonl")[1]}
    gpus = max(gpus for gpus, _ in steps)
    ours = steps[gpus, "msamp_o2, lowprec_ddp"]
    fp8, te = (
        steps[gpus, name]
        for name in ("te_fp8, lowprec_ddp", "lightning TransformerEnginePrecision, bf16 weights, no masters, ddp")
    )
    whole = "{tokens_per_s:,} tokens/s, {ms:.1f} ms, {peak_gib:.1f} GiB a GPU".format
    settings = "cuDNN attention, head in FP8"
    figure, own = (
        f"Whole step on {gpus} GPUs, Llama-8B-shaped",
        f"``msamp_o2``, ``lowprec_ddp``, {settings}: {whole(**ours)}",
    )
    rows += [
        (
            figure,
            own,
            f"``te_fp8`` (FP32 weights and gradients), ``lowprec_ddp``, {settings}: {whole(**fp8)}",
            f"{fp8['ms'] / ours['ms']:.3f} × as fast",
        ),
        (
            figure,
            own,
            "Lightning's TransformerEnginePrecision, BF16 weights and states, DDP, torch's attention, head in FP8: "
            f"{whole(**te)}",
            "– (not the same attention)",
        ),
    ]
    return rows


def gradient_sync() -> str:
    """Time to average gradients, from gradient_sync_h200.jsonl."""
    origins, figures = read(RESULTS / "gradient_sync_h200.jsonl")
    table = rst_table(
        ("Gradients averaged by", "GPUs", "ms: median (min – max)", "of bf16", "MB sent", "relative error"),
        [
            (
                f["contestant"],
                str(f["gpus"]),
                milliseconds(f, 3),
                f"{f['of_bf16']:.3f}",
                f"{f['bytes_sent'] / 1e6:,.0f}",
                f"{f['error']:.4f}" if "error" in f else "–",
            )
            for f in figures
        ],
    )
    return f"{origin(origins)}\n\n{table}"


def parallel_step() -> str:
    """Whole steps on several GPUs, from parallel_step_h200.jsonl."""
    origins, figures = read(RESULTS / "parallel_step_h200.jsonl")
    table = rst_table(
        (
            "Contestant",
            "GPUs",
            "tokens/s",
            "of as many single ones",
            "ms a step: median (min – max)",
            "peak GiB",
            "GB sent a step",
        ),
        [
            (
                f["name"],
                str(f["gpus"]),
                f"{f['tokens_per_s']:,}",
                f"{f['of_one_gpu']:.2f}" if "of_one_gpu" in f else "–",
                milliseconds(f, 1),
                f"{f['peak_gib']:.1f}",
                f"{f['bytes_sent'] / 1e9:.2f}" if "bytes_sent" in f else "–",
            )
            for f in sorted(figures, key=lambda f: (-f["gpus"], -f["tokens_per_s"]))
        ],
    )
    return f"{origin(origins)}\n\n{table}"


def parallel_parity() -> str:
    """Validation losses on several GPUs beside one, from loss_parity_parallel_h200.jsonl."""
    origins, figures = read(RESULTS / "loss_parity_parallel_h200.jsonl")
    losses = {f["level"]: f["val_loss"] for f in figures if f["benchmark"] == "loss_parity"}
    rows = [f for f in figures if f["benchmark"] == "loss_parity"]
    table = rst_table(
        ("Level", "strategy", "GPUs", "validation loss", "gap to one GPU, %", "gap to bf16_mixed on one GPU, %"),
        [
            (
                f"``{level}``",
                strategy or "–",
                str(f["gpus"]),
                f"{f['val_loss']:.4f}",
                _gap(f["val_loss"], losses.get(level)) if strategy else "–",
                _gap(f["val_loss"], losses.get("bf16_mixed")),
            )
            for f in sorted(rows, key=lambda f: f["level"])
            for level, _, strategy in [f["level"].partition("@")]
        ],
    )
    return f"{origin(origins)}\n\n{table}"


def _gap(loss: float, beside: float | None) -> str:
    return "–" if beside is None else f"{(loss / beside - 1) * 100:+.2f}"


def parallel_picture(path: Path) -> None:
    """Tokens/s of the largest number of GPUs, by contestant."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    origins, figures = read(RESULTS / "parallel_step_h200.jsonl")
    gpus = max(f["gpus"] for f in figures)
    rows = sorted((f for f in figures if f["gpus"] == gpus), key=lambda f: f["tokens_per_s"])
    figure, axes = plt.subplots(figsize=(11, 0.34 * len(rows) + 1.2))
    colors = ["#8899aa" if f["name"].startswith(OTHERS) else "#76b900" for f in rows]
    bars = axes.barh([f["name"] for f in rows], [f["tokens_per_s"] for f in rows], color=colors)
    axes.bar_label(bars, [f"{f['tokens_per_s']:,}  ({f['peak_gib']:.0f} GiB)" for f in rows], padding=3, fontsize=8)
    axes.set(
        xlabel=f"tokens/s of whole training steps, Llama-8B-shaped, {gpus} × {origins[0]['gpu']}",
        title="green: this project",
    )
    axes.margins(y=0.02)
    axes.set_xlim(right=1.2 * rows[-1]["tokens_per_s"])
    axes.tick_params(axis="y", labelsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=110)

"""Bars of what docs/measured.rst has long tables of: each shows the rows that a reader compares first."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from benchmarks import expert_tables, lora_tables
from benchmarks.everyday_contestants import LEVELS, OURS
from benchmarks.memory import LIGHTNING
from benchmarks.memory_tables import saved, vision
from benchmarks.parallel_tables import averages
from benchmarks.pictures import Bar, Bars, Picture
from benchmarks.record import RESULTS, read
from nemo_lowprec.chart import CHART
from nemo_lowprec.comm.bucketing import BUCKET_BYTES

__all__ = ["PICTURES"]


def _bar(name: str, of: str, value: float, text: str) -> Bar:
    """A bar with its name above the case that it is of."""
    return Bar(f"{name},\n{of}" if of else name, value, text, name.startswith(OURS))


def experts() -> Picture:
    """The two levels and the faster peer, on each mixture of experts."""
    rows: list[Bar] = []
    gains, peers = [], []
    for model, of in expert_tables.figures().items():
        levels = [of[OURS + level] for level in LEVELS]
        others = [f for name, f in of.items() if name != expert_tables.BF16 and not name.startswith(OURS) and "x" in f]
        peer = max(others, key=lambda f: f["x"])
        for f in (*levels, peer):
            rows.append(_bar(f["name"], model, f["x"], f"{f['x']:.2f} × ({f['ms']:.0f} ms)"))
        gains += [f["x"] for f in levels]
        peers.append(peer["x"])
    see = (
        f"Two levels are {min(gains):.2f} to {max(gains):.2f} × as fast as training with BF16 weights and states on "
        f"{len(peers)} mixtures of experts, and the faster of the peers {min(peers):.2f} to {max(peers):.2f} ×."
    )
    shown = f"Bars: each of the {len(peers)} models with default arguments, and the faster one of the two peers there."
    xlabel = "× BF16 weights and states (in brackets: ms a step)\nwhole training steps, one NVIDIA H200"
    return Picture("experts_h200.png", see, shown, Bars(xlabel, tuple(rows)))


def lora() -> Picture:
    """The default level beside BF16, in all four cases."""
    rows: list[Bar] = []
    ours, beside = (lora_tables.figures(name) for name in (f"{OURS}bf16_with_fp8_mixed", lora_tables.BF16))
    for (batch, recomputes), f in ours.items():
        case = f"{batch} × {f['sequence']}{', recomputed' if recomputes else ''}"
        for one in (f, beside[batch, recomputes]):
            end = f"{one['tokens_per_s']:,} ({one['peak_gib']:.0f} GiB)"
            rows.append(_bar(one["name"], case, one["tokens_per_s"], end))
    most = max(ours.values(), key=lambda f: f["x"])
    see = (
        f"In each of {len(ours)} cases LoRA of Llama-3-8B is faster and smaller with the base in FP8: up to "
        f"{most['x']:.2f} × as fast."
    )
    shown = "Bars: ``bf16_with_fp8_mixed`` beside PEFT under BF16 autocast; the table has ``msamp_o2``, too."
    return Picture("lora_h200.png", see, shown, Bars("tokens/s (in brackets: GiB at the peak)", tuple(rows)))


def optimizer_step() -> Picture:
    """Optimizers' steps, but for stochastic rounding, which takes about as long."""
    figures = [f for f in read(RESULTS / "optimizer_step_h200.jsonl")[1] if "of_copy" in f]
    shown = [f for f in figures if "stochastic" not in f["name"]]

    def named(name: str) -> str:
        return name.replace(f"{OURS.strip()}:", f"{OURS}AdamW:").replace(": ", ",\n", 1)

    rows = [_bar(named(f["name"]), "", f["ms"], f"{f['ms']:.2f}") for f in shown]
    own = [f["ms"] for f in shown if f["name"].startswith(OURS.strip())]
    low = [f["ms"] for f in shown if f["name"].startswith("torchao") or "FP8+FP16 states" in f["name"]]
    others = [ms for ms in low if ms not in own]
    see = (
        f"This project's steps take {min(own):.1f} to {max(own):.1f} ms, and those of other packages with states in 8 "
        f"bits {min(others):.0f} to {max(others):.0f} ms."
    )
    words = "Bars: all rows of the table below without stochastic rounding."
    return Picture(
        "optimizer_step_h200.png", see, words, Bars("ms a step, 1.1 B parameters, one NVIDIA H200", tuple(rows))
    )


def memory() -> Picture:
    """Peaks of two vision models at the MS-AMP levels, beside FP16 AMP."""
    rows: list[Bar] = []
    for model, of in vision().items():
        for level in (LIGHTNING, "fp16_amp", "msamp_o1", "msamp_o2", "msamp_o3"):
            name = OURS + level if level in CHART else f"Lightning's {level}"
            f = of[level]
            rows.append(_bar(name, model, f["peak_allocated_mb"], f"{f['peak_allocated_mb']:,} ({f['ms']:.0f} ms)"))
    most = max(saved(of, "msamp_o2") for of in vision().values())
    see = f"``msamp_o2`` takes up to {most:.1f} % less memory than Lightning's ``{LIGHTNING}``, and less time."
    shown = "Bars: whole training steps of both models with default arguments; the table has further options."
    return Picture("memory_h200.png", see, shown, Bars("MB at the peak (in brackets: ms a step)", tuple(rows)))


def gradient_sync() -> Picture:
    """Averaging in FP8 beside NCCL's all-reduces."""
    names = {"fp32 all_reduce": "NCCL's all_reduce in FP32", "bf16 all_reduce": "NCCL's all_reduce in BF16"}
    size = f"buckets of {BUCKET_BYTES >> 20} MiB"
    names |= {f"fp8, {size}": f"{OURS}FP8", f"fp8, by collectives, {size}": f"{OURS}FP8, by collectives"}
    rows = []
    for gpus, of in averages().items():
        for key, name in names.items():
            rows.append(_bar(name, f"{gpus} GPUs", of[key]["ms"], f"{of[key]['ms']:.2f} ms"))
    found = averages()[max(averages())]
    see = (
        f"On {max(averages())} GPUs of one machine FP8 takes {found[f'fp8, {size}']['ms']:.2f} ms by copies between "
        f"GPUs, {found[f'fp8, by collectives, {size}']['ms']:.2f} by NCCL's collectives, and BF16 "
        f"{found['bf16 all_reduce']['ms']:.2f}."
    )
    shown = "Bars: quantization is included; the table has other sizes of buckets, bytes and errors."
    return Picture("gradient_sync_h200.png", see, shown, Bars("ms for 268 M gradients", tuple(rows)))


def host() -> Picture:
    """Host time of a layer."""
    figures: list[dict[str, Any]] = read(RESULTS / "host_h200.jsonl")[1]
    levels = [f for f in figures if f["name"] in CHART and CHART[f["name"]].has_fp8]
    shown = [*levels, *(f for f in figures if f["name"] in ("nn.Linear", "te.Linear, FP8"))]
    bar = partial(_bar, of="")
    rows = [
        bar(OURS + f["name"] if f["name"] in CHART else f["name"], value=f["both_us"], text=f"{f['both_us']:.0f} µs")
        for f in shown
    ]
    least, most = (pick(f["both_us"] for f in levels) for pick in (min, max))
    see = f"At {len(levels)} FP8 levels the host takes {least:.0f} to {most:.0f} µs to launch a layer."
    words = "Bars: forward and backward of one layer without CUDA graphs."
    return Picture("host_h200.png", see, words, Bars("µs of the host, forward and backward of a layer", tuple(rows)))


PICTURES: dict[str, Callable[[], Picture]] = {
    "experts_picture": experts,
    "lora_picture": lora,
    "optimizer_step_picture": optimizer_step,
    "memory_picture": memory,
    "gradient_sync_picture": gradient_sync,
    "host_picture": host,
}

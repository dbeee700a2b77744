"""Tables and pictures of whole training steps on one GPU."""

from __future__ import annotations

from typing import Any

from benchmarks.llama import BATCH, SEQUENCE
from benchmarks.pictures import Bars, Picture, bars
from benchmarks.record import RESULTS, read
from benchmarks.rst import block, milliseconds, origin, simple_table, times

__all__ = ["TE", "TORCHAO", "fastest", "fastest_picture", "rowwise", "steps", "throughput", "throughput_picture"]

TE = "lightning TransformerEnginePrecision, bf16 weights, no masters"
TORCHAO = "torchao float8 tensorwise, compiled layers, bf16-true"
_BESIDE = {  # what the others are called in pictures
    TE: "Lightning's Transformer Engine, BF16 weights,\nno masters, head in FP8",
    TORCHAO: "torchao float8, compiled layers,\nBF16 weights, no masters",
    "lightning bf16-true": "Lightning's bf16-true: BF16 weights, no masters",
    "lightning bf16-mixed": "Lightning's bf16-mixed: FP32 weights",
    "lightning TransformerEnginePrecision, FP32 weights": "Lightning's Transformer Engine, FP32 weights,\nhead in FP8",
}
_ROWWISE = "nemo_lowprec bf16_with_fp8_rowwise_mixed"
_LEVELS = ("msamp_o2", "msamp_o3", "bf16_with_fp8_mixed", "te_fp8", "bf16_mixed")


def steps() -> dict[str, dict[str, Any]]:
    """The figures of every contestant by name, from train_step_h200.jsonl."""
    return {f["name"]: f for f in read(RESULTS / "train_step_h200.jsonl")[1] if "ms" in f}


def _fastest() -> dict[str, dict[str, Any]]:
    """Contestants with cuDNN's attention or Liger's kernels and the head in FP8, which ``fastest`` alone lists."""
    kernels = {name: f for name, f in steps().items() if "cuDNN" in name or "Liger" in name}
    return {name: f for name, f in kernels.items() if "FP8 head" in name or name.startswith(TE)}


def throughput() -> str:
    """Whole training steps, but for those of ``fastest``."""
    found = steps()
    o2, hand = found["nemo_lowprec msamp_o2"], found["by hand bf16_with_fp8_mixed"]
    under, release = found["nemo_lowprec bf16_with_fp8_mixed"], found["nemo_lowprec msamp_o2, gradient_release"]
    takeaway = (
        f"``bf16_with_fp8_mixed`` as a plugin is {times(under, hand, 3)} as fast as the same loop by hand "
        f"({under['ms']:.1f} and {hand['ms']:.1f} ms), and ``gradient_release`` takes ``msamp_o2`` from "
        f"{o2['peak_gib']:.1f} to {release['peak_gib']:.1f} GiB at {times(release, o2, 3)} its speed."
    )
    rows = [f for name, f in found.items() if name not in _fastest()]
    return block(takeaway, _table(rows), _origin())


def fastest() -> str:
    """Whole training steps with cuDNN's attention or Liger's kernels."""
    found = _fastest()
    ours, te = found["nemo_lowprec msamp_o2, cuDNN attention, FP8 head"], found[f"{TE}, cuDNN attention"]
    takeaway = (
        f"With cuDNN's attention and the head in FP8 on both sides ``msamp_o2`` is {times(ours, te, 3)} as "
        f"fast as Lightning's Transformer Engine, in {ours['peak_gib']:.1f} GiB beside {te['peak_gib']:.1f}."
    )
    return block(takeaway, _table(list(found.values())), _origin())


def _origin() -> str:
    return origin(read(RESULTS / "train_step_h200.jsonl")[0])


def _table(figures: list[dict[str, Any]]) -> str:
    return simple_table(
        ("Contestant", "tokens/s", "ms a step: median (min – max)", "peak GiB"),
        [
            (f["name"], f"{f['tokens_per_s']:,}", milliseconds(f, 1), f"{f['peak_gib']:.1f}")
            for f in sorted(figures, key=lambda f: -f["tokens_per_s"])
        ],
    )


def _bars(found: dict[str, dict[str, Any]], labels: dict[str, str]) -> Bars:
    gpu = read(RESULTS / "train_step_h200.jsonl")[0][0]["gpu"]
    xlabel = f"tokens/s (in brackets: GiB at the peak)\nbatch {BATCH} × {SEQUENCE}, one {gpu}"
    return bars(xlabel, list(found.values()), labels)


def throughput_picture() -> Picture:
    """With torch's attention: the contestants of other packages, and five levels."""
    found = steps()
    o2, mixed, torchao = (found[name] for name in ("nemo_lowprec msamp_o2", "lightning bf16-mixed", TORCHAO))
    see = (
        f"``msamp_o2`` is {times(o2, mixed)} as fast as Lightning's ``bf16-mixed``, in {o2['peak_gib']:.1f} GiB beside "
        f"{mixed['peak_gib']:.1f}, and {times(o2, torchao, 3)} as fast as torchao's compiled float8 layers, which take "
        f"{torchao['peak_gib']:.1f} GiB."
    )
    shown = (
        "Attention is torch's for every contestant; the head is in half precision unless a bar says FP8. Bars: the "
        "contestants of other packages without further kernels, and five of this project's levels; the tables of "
        "``docs/measured.rst`` have all."
    )
    labels = {f"nemo_lowprec {level}": f"nemo_lowprec {level}" for level in _LEVELS} | _BESIDE
    return Picture("train_step_h200.png", see, shown, _bars(found, labels))


def fastest_picture() -> Picture:
    """The fastest contestants, but for msamp_o3, whose steps take as long as msamp_o2's."""
    found = {name: f for name, f in _fastest().items() if "msamp_o3" not in name}
    best, liger, cudnn = (
        max(found.values(), key=lambda f: f["tokens_per_s"]),
        *(found[f"{TE}, {with_}"] for with_ in ("Liger kernels", "cuDNN attention")),
    )
    see = (
        f"The fastest contestant, {best['name']}, comes to {best['tokens_per_s']:,} tokens/s, and Lightning's "
        f"Transformer Engine to {cudnn['tokens_per_s']:,} with cuDNN's attention and to {liger['tokens_per_s']:,} with "
        "Liger's kernels."
    )
    labels = {}
    for name in found:
        ours, *options = name.removeprefix(TE).split(", ")
        who = ours or "Lightning's Transformer Engine, BF16 weights"
        labels[name] = f"{who},\n" + ", ".join(option for option in options if option != "FP8 head")
    shown = "Bars: all rows of the table below, but for ``msamp_o3``; the head is in FP8 on every side."
    return Picture("train_step_fastest_h200.png", see, shown, _bars(found, labels))


def rowwise() -> str:
    """Tokens a second with rowwise scaling, beside torchao's two recipes."""
    origins, figures = read(RESULTS / "rowwise_h200.jsonl")
    by = {f["name"]: f for f in figures}
    theirs = max(f["tokens_per_s"] for f in figures if f["name"].startswith("torchao"))
    takeaway = (
        f"``bf16_with_fp8_rowwise_mixed`` is {by[_ROWWISE]['tokens_per_s'] / theirs:.2f} × as fast as the faster of"
        f" torchao's two recipes in compiled layers, and {by[f'{_ROWWISE}, fast_accum']['tokens_per_s'] / theirs:.2f} ×"
        " with ``fast_accum``. torchao's recipes sum fast in the forward GEMM alone."
    )
    rows = [(f["name"], f"{f['tokens_per_s']:,}", milliseconds(f, 1), f"{f['peak_gib']:.1f}") for f in figures]
    headers = ("Contestant", "tokens/s", "ms a step: median (min – max)", "peak GiB")
    return block(takeaway, simple_table(headers, rows), origin(origins))

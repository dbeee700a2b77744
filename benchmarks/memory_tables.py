"""Tables of the memory that training takes."""

from __future__ import annotations

from operator import itemgetter
from typing import Any

from benchmarks.memory import LIGHTNING
from benchmarks.record import RESULTS, read
from benchmarks.rst import block, failure, origin, simple_table

__all__ = ["llama_8b", "memory", "on_one_gpu", "saved", "vision"]


def vision() -> dict[str, dict[str, dict[str, Any]]]:
    """Figures of memory_h200.jsonl, by model and level."""
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for f in read(RESULTS / "memory_h200.jsonl")[1]:
        if "ms" in f:
            found.setdefault(f["model"], {})[f["level"]] = f
    return found


def on_one_gpu() -> dict[str, dict[str, Any]]:
    """Figures of llama_8b_h200.jsonl, by level."""
    return {f["level"]: f for f in read(RESULTS / "llama_8b_h200.jsonl")[1]}


def saved(of: dict[str, dict[str, Any]], level: str) -> float:
    """Percent of the peak of Lightning's FP16 AMP that ``level`` saves, on one model."""
    return (1 - of[level]["peak_allocated_mb"] / of[LIGHTNING]["peak_allocated_mb"]) * 100


def _without_graphs(of: dict[str, dict[str, Any]]) -> str:
    """Memory and time of each level that one model was trained at with and without graphs."""
    said = []
    for level, graphed in of.items():
        if eager := of.get(f"{level}, graphs=False"):
            less = (1 - eager["peak_allocated_mb"] / graphed["peak_allocated_mb"]) * 100
            said.append(f"{less:.0f} % less memory and {eager['ms'] / graphed['ms']:.1f} × the time at ``{level}``")
    return " and ".join(said)


def memory() -> str:
    """Peak memory of two vision models."""
    found = vision()
    said = [
        f"{saved(of, 'msamp_o2'):.1f} % on {model} at {of['msamp_o2']['ms'] / of[LIGHTNING]['ms']:.2f} × its time"
        for model, of in found.items()
    ]
    takeaway = (
        f"Of the peak of Lightning's ``{LIGHTNING}`` ``msamp_o2`` saves {' and '.join(said)}. On swin_1b a step"
        f" without graphs takes {_without_graphs(found['swin_1b'])}."
    )
    columns = ("weights", "masters", "gradients", "states", "rest")
    table = simple_table(
        ("Model, batch", "Level", "peak MB", "saved, %", *columns, "reserved MB", "ms a step"),
        [
            (
                f"{f['model']}, {f['batch']}",
                f"``{level}``",
                f"{f['peak_allocated_mb']:,}",
                f"{saved(of, level):.1f}",
                *(f"{f['mb_at_peak'][c]:,.0f}" for c in columns),
                f"{f['peak_reserved_mb']:,}",
                f"{f['ms']:.1f}",
            )
            for of in found.values()
            for level, f in of.items()
        ],
    )
    return block(takeaway, table, origin(read(RESULTS / "memory_h200.jsonl")[0], "timm"))


def llama_8b() -> str:
    """Llama-3-8B on one GPU."""
    found = on_one_gpu()
    trained = [f for f in found.values() if "error" not in f]
    small, fast = min(trained, key=itemgetter("peak_gib")), max(trained, key=itemgetter("tokens_per_s"))
    said = [f"``{level}`` ends {failure(f)}" for level, f in found.items() if "error" in f]
    said.append(f"``{small['level']}`` trains within {small['peak_gib']:.1f} GiB")
    if fast is not small:
        times = fast["tokens_per_s"] / small["tokens_per_s"]
        said.append(f"``{fast['level']}`` is {times:.2f} × as fast within {fast['peak_gib']:.1f} GiB")
    rows = []
    for level, f in found.items():
        if "error" in f:
            rows.append((f"``{level}``", failure(f), "–", "–", "–"))
        else:
            sizes = (f"{f[key]:.1f}" for key in ("peak_gib", "peak_reserved_gib", "setup_peak_gib"))
            rows.append((f"``{level}``", f"{f['tokens_per_s']:,}", *sizes))
    table = simple_table(("Level", "tokens/s", "peak GiB", "reserved GiB", "GiB while setting up"), rows)
    return block(f"{'; '.join(said)}.", table, origin(read(RESULTS / "llama_8b_h200.jsonl")[0]))

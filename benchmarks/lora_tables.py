"""The table of fine-tuning Llama-3-8B through adapters."""

from __future__ import annotations

from benchmarks.lora import BF16
from benchmarks.record import RESULTS, origins_of, read
from benchmarks.rst import block, failure, origin, simple_table

__all__ = ["lora"]

_RESULTS = RESULTS / "lora_h200.jsonl"
OURS = "nemo_lowprec "


def lora() -> str:
    """Tokens a second and memory of every contestant."""
    figures = read(_RESULTS)[1]
    default = [f for f in figures if f["name"] == f"{OURS}bf16_with_fp8_mixed"]
    beside = {(f["batch"], f["recomputes"]): f for f in figures if f["name"] == BF16}
    gains = [f["x"] for f in default]
    parts = default[0]["gib"]
    takeaway = (
        f"``bf16_with_fp8_mixed`` is {min(gains):.2f} × to {max(gains):.2f} × as fast as BF16, and its peak is"
        f" {_less(default, beside)} below. The frozen base takes {parts['base']:.1f} GiB instead of"
        f" {beside[1, False]['gib']['base']:.1f}."
    )
    rows = [
        (
            f"{f['batch']} × {f['sequence']}{', recomputed' if f['recomputes'] else ''}",
            f["name"].removeprefix(OURS),
            *((failure(f), "", "", "") if "error" in f else (
                f"{f['tokens_per_s']:,}", f"{f['x']:.2f}", f"{f['peak_gib']:.1f}", f"{f['activations_gib']:.1f}"
            )),
        )
        for f in figures
    ]  # fmt: skip
    header = ("Tokens", "Contestant", "tokens/s", "× BF16", "peak GiB", "of activations")
    return block(takeaway, simple_table(header, rows), origin(origins_of(_RESULTS, lambda f: True), "transformers"))


def _less(default: list[dict], beside: dict) -> str:
    saved = [(1 - f["peak_gib"] / beside[f["batch"], f["recomputes"]]["peak_gib"]) * 100 for f in default]
    return f"{min(saved):.0f} % to {max(saved):.0f} %"

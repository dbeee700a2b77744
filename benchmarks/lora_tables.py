"""The table of fine-tuning Llama-3-8B through adapters."""

from __future__ import annotations

from typing import Any

from benchmarks.lora import BF16
from benchmarks.record import RESULTS, origins_of, read
from benchmarks.rst import block, failure, origin, simple_table

__all__ = ["BF16", "figures", "largest", "lora"]

_RESULTS = RESULTS / "lora_h200.jsonl"
_OURS = "nemo_lowprec "
_DEFAULT = f"{_OURS}bf16_with_fp8_mixed"

_Figures = dict[tuple[int, bool], dict[str, Any]]


def figures(name: str) -> _Figures:
    """A contestant's figures, by batch and by whether layers are recomputed."""
    return {(f["batch"], f["recomputes"]): f for f in read(_RESULTS)[1] if f["name"] == name}


def largest() -> tuple[dict[str, Any], dict[str, Any]]:
    """Figures of ``bf16_with_fp8_mixed`` and of BF16 at the largest batch, where nothing is recomputed."""
    ours = figures(_DEFAULT)
    key = max(batch for batch, _ in ours), False
    return ours[key], figures(BF16)[key]


def lora() -> str:
    """Tokens a second and memory of every contestant."""
    default, beside = figures(_DEFAULT), figures(BF16)
    gains = [f["x"] for f in default.values()]
    parts = default[1, False]["gib"]
    takeaway = (
        f"``bf16_with_fp8_mixed`` is {min(gains):.2f} × to {max(gains):.2f} × as fast as BF16, and its peak is"
        f" {_less(default, beside)} below. The frozen base takes {parts['base']:.1f} GiB instead of"
        f" {beside[1, False]['gib']['base']:.1f}."
    )
    rows = [
        (
            f"{f['batch']} × {f['sequence']}{', recomputed' if f['recomputes'] else ''}",
            f["name"].removeprefix(_OURS),
            *((failure(f), "", "", "") if "error" in f else (
                f"{f['tokens_per_s']:,}", f"{f['x']:.2f}", f"{f['peak_gib']:.1f}", f"{f['activations_gib']:.1f}"
            )),
        )
        for f in read(_RESULTS)[1]
    ]  # fmt: skip
    header = ("Tokens", "Contestant", "tokens/s", "× BF16", "peak GiB", "of activations")
    return block(takeaway, simple_table(header, rows), origin(origins_of(_RESULTS, lambda f: True), "transformers"))


def _less(default: _Figures, beside: _Figures) -> str:
    saved = [(1 - f["peak_gib"] / beside[key]["peak_gib"]) * 100 for key, f in default.items()]
    return f"{min(saved):.0f} % to {max(saved):.0f} %"

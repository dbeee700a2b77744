"""Tables of rowwise scaling, whole steps, and of patch embeddings, single layers."""

from __future__ import annotations

from typing import Any

from benchmarks.record import RESULTS, read
from benchmarks.rst import block, milliseconds, origin, simple_table

__all__ = ["patch_embedding", "rowwise"]

_OURS = "nemo_lowprec bf16_with_fp8_rowwise_mixed"


def rowwise() -> str:
    """Tokens a second with rowwise scaling, beside torchao's two recipes."""
    origins, figures = read(RESULTS / "rowwise_h200.jsonl")
    by = {f["name"]: f for f in figures}
    theirs = max(f["tokens_per_s"] for f in figures if f["name"].startswith("torchao"))
    takeaway = (
        f"``bf16_with_fp8_rowwise_mixed`` is {by[_OURS]['tokens_per_s'] / theirs:.2f} × as fast as the faster of"
        f" torchao's two recipes in compiled layers, and {by[f'{_OURS}, fast_accum']['tokens_per_s'] / theirs:.2f} ×"
        " with ``fast_accum``, which torchao's recipes have."
    )
    rows = [(f["name"], f"{f['tokens_per_s']:,}", milliseconds(f, 1), f"{f['peak_gib']:.1f}") for f in figures]
    headers = ("Contestant", "tokens/s", "ms a step: median (min – max)", "peak GiB")
    return block(takeaway, simple_table(headers, rows), origin(origins))


def patch_embedding() -> str:
    """The GPU's time for each layer, by contestant."""
    origins, figures = read(RESULTS / "patch_embedding_h200.jsonl")
    by: dict[str, dict[str, Any]] = {}
    for f in figures:
        by.setdefault(f["layer"], {})[f["name"]] = f["gpu_ms"]
    names = list(dict.fromkeys(f["name"] for f in figures))
    shares = [min(times[name] for name in names[2:]) / times["cuDNN"] for times in by.values()]
    takeaway = (
        f"At the faster of the two levels a layer takes {min(shares):.2f} to {max(shares):.2f} of the GPU's time that"
        " cuDNN's convolution takes."
    )
    rows = [(layer, *(f"{times[name]:.2f}" for name in names)) for layer, times in by.items()]
    return block(takeaway, simple_table(("Layer", *names), rows), origin(origins))

"""The table of NeMo's recipe with its own precision plugin and with this package's."""

from __future__ import annotations

from benchmarks.nemo_recipe import LEVELS, PATHS
from benchmarks.record import RESULTS, read
from benchmarks.rst import block, failure, milliseconds, origin, simple_table

__all__ = ["nemo_recipe"]

_CALLED = {"nemo": "NeMo's plugin", "same": "nemo_lowprec, as NeMo's", "level": "nemo_lowprec"}


def nemo_recipe() -> str:
    """Losses and tokens a second, from nemo_recipe_h200.jsonl."""
    origins, figures = read(RESULTS / "nemo_recipe_h200.jsonl")
    figures.sort(key=lambda f: (list(LEVELS).index(f["level"]), PATHS.index(f["path"])))
    nemos = {f["level"]: f for f in figures if f["path"] == "nemo" and "ms" in f}
    pairs = [(f, nemos[f["level"]]) for f in figures if f["path"] != "nemo" and "ms" in f and f["level"] in nemos]
    ratios = [f["of_nemo"] for f, _ in pairs if f["of_nemo"]]
    takeaway = (
        f"In NeMo's recipe this package's plugin is {min(ratios):.2f} to {max(ratios):.2f} × as fast as NeMo's of the "
        "same level."
    )
    apart = {(f["level"], f["path"]): f"{_apart(f['losses'], nemo['losses']):.4f}" for f, nemo in pairs}
    rows = []
    for f in figures:
        if "error" in f:
            shown = (failure(f), "–", "–", "–", "–", "–")
        else:
            shown = (
                f"{f['tokens_per_s']:,}",
                f"{f['of_nemo']:.3f}" if f["of_nemo"] else "–",
                milliseconds(f, 1),
                f"{f['peak_gib']:.1f}",
                f"{f['losses'][0]:.4f} → {f['losses'][-1]:.4f}",
                apart.get((f["level"], f["path"]), "–"),
            )
        rows.append((f"``{f['level']}``", _CALLED[f["path"]], *shown))
    header = (
        "Level", "plugin", "tokens/s", "of NeMo's", "ms a step: median (min – max)", "peak GiB",
        "loss: first → last step", "furthest from NeMo's",
    )  # fmt: skip
    return block(takeaway, simple_table(header, rows), origin(origins, "megatron-core"))


def _apart(losses: list[float], others: list[float]) -> float:
    return max(abs(a - b) for a, b in zip(losses, others, strict=True))

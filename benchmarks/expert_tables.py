"""Tables of mixtures of experts: whole training steps, and bytes by column."""

from __future__ import annotations

from typing import Any

from benchmarks.experts_contestants import BF16, CONTESTANTS, OURS
from benchmarks.record import RESULTS, origins_of, read
from benchmarks.rst import block, failure, origin, simple_table

__all__ = ["BF16", "DEFAULT", "experts", "experts_columns", "figures"]

_RESULTS = RESULTS / "experts_h200.jsonl"
_STEPS, _BYTES = "experts", "experts_bytes"
DEFAULT = f"{OURS}bf16_with_fp8_mixed"
_PEERS = [name for name in CONTESTANTS if name != BF16 and not name.startswith(OURS)]


def figures(benchmark: str = _STEPS) -> dict[str, dict[str, dict[str, Any]]]:
    """Figures of experts_h200.jsonl, by model and contestant; BF16 has two, and the later one counts."""
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for f in read(_RESULTS)[1]:
        if f["benchmark"] == benchmark:
            found.setdefault(f["model"], {})[f["name"]] = f
    return found


def _origin(benchmark: str) -> str:
    return origin(origins_of(_RESULTS, lambda f: f["benchmark"] == benchmark), "transformers", "torchao")


def _cells(f: dict[str, Any] | None) -> str:
    if f is None:
        return "–"
    return failure(f) if "error" in f else f"{f['ms']:.1f} ms, {f['x']:.2f} ×, {f['peak_mib'] / 1024:.1f} GiB"


def experts() -> str:
    """Every contestant on every model."""
    found = figures()
    gains = [f"{of[DEFAULT]['x']:.2f} × on {model.split(',')[0]}" for model, of in found.items()]
    best = {name: max(of[name].get("x", 0.0) for of in found.values() if name in of) for name in _PEERS}
    peers = " and ".join(f"{x:.2f} × ({name})" for name, x in best.items())
    takeaway = (
        f"``bf16_with_fp8_mixed`` is {', '.join(gains[:-1])} and {gains[-1]} as fast as the model with BF16 "
        f"weights and states; the peers reach at most {peers}."
    )
    rows = [(name, *(_cells(of.get(name)) for of in found.values())) for name in CONTESTANTS]
    table = simple_table(("Contestant", *found), [(name.removeprefix(OURS), *cells) for name, *cells in rows])
    return block(takeaway, table, _origin(_STEPS))


def experts_columns() -> str:
    """Bytes a parameter, by column."""
    found = figures(_BYTES)
    rows = [
        (model, f"``{level}``", *(f"{size:.2f}" for size in f["by_column"].values()), f"{f['bytes_per_param']:.2f}")
        for model, of in found.items()
        for level, f in of.items()
    ]
    least = min((f for of in found.values() for f in of.values()), key=lambda f: f["bytes_per_param"])
    takeaway = (
        f"Experts are stored as all other weights of a level: ``{least['name']}`` takes {least['bytes_per_param']:.2f}"
        f" bytes a parameter."
    )
    columns = next(iter(next(iter(found.values())).values()))["by_column"]
    table = simple_table(("Model", "Level", *columns, "all"), rows)
    return block(takeaway, table, _origin(_BYTES))

"""The tables of NeMo's recipe with its own precision plugin and with this package's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from benchmarks.nemo_recipe import LEVELS, PATHS
from benchmarks.record import RESULTS, read
from benchmarks.rst import block, failure, origin, simple_table

__all__ = ["nemo_recipe"]

_HEADER = ("Level", "NeMo's", "the same", "defaults")
_STUCK = 0.9  # of the loss of the first step: a run that ends above it has not trained
_Runs = dict[str, dict[str, dict[str, Any]]]


def nemo_recipe() -> str:
    """Tokens a second and losses of the last step, from nemo_recipe_h200.jsonl."""
    origins, figures = read(RESULTS / "nemo_recipe_h200.jsonl")
    runs: _Runs = {
        level: {path: f for path in PATHS for f in figures if (f["level"], f["path"]) == (level, path)}
        for level in LEVELS
        if any(f["level"] == level for f in figures)
    }
    return "\n\n".join((_speeds(runs), _losses(runs), origin(origins, "megatron-core", "nemo-toolkit")))


def _speeds(runs: _Runs) -> str:
    found = {path: [_run(runs, level, path) for level in runs] for path in ("same", "level")}
    ratios = [[f["of_nemo"] for f in figures if f and f.get("of_nemo")] for figures in found.values()]
    same, defaults = (f"{min(of):.2f} to {max(of):.2f} ×" for of in ratios)
    takeaway = (
        f"In NeMo's recipe this package's plugin is {same} as fast as NeMo's of the level with the same settings, and "
        f"{defaults} with its defaults. The table has tokens a second, and the memory that the defaults take beyond "
        "NeMo's plugin."
    )
    more = {
        level: f"{of['level']['peak_gib'] - of['nemo']['peak_gib']:+.2f}"
        for level, of in runs.items()
        if all("peak_gib" in of.get(path, {}) for path in ("nemo", "level"))
    }
    rows = [(*_cells(runs, level, lambda f: f"{f['tokens_per_s']:,}"), more.get(level, "–")) for level in runs]
    return block(takeaway, simple_table((*_HEADER, "GiB more"), rows))


def _losses(runs: _Runs) -> str:
    apart = {level: _apart(of) for level, of in runs.items()}
    stuck = [level for level, of in runs.items() if "losses" in of.get("nemo", {}) and _has_not_trained(of["nemo"])]
    along = [x for level, x in apart.items() if x is not None and level not in stuck]
    takeaway = f"In no step is this package's loss further than {max(along):.4f} from that of NeMo's plugin"
    if stuck:
        takeaway += f", but at {' and '.join(f'``{level}``' for level in stuck)}, where NeMo's plugin does not train"
    takeaway += ". The table has the loss of the last step, and the largest distance of any step's loss from NeMo's."
    rows = [
        (*_cells(runs, level, lambda f: f"{f['losses'][-1]:.4f}"), "–" if x is None else f"{x:.4f}")
        for level, x in apart.items()
    ]
    return block(takeaway, simple_table((*_HEADER, "apart"), rows))


def _run(runs: _Runs, level: str, path: str) -> dict[str, Any] | None:
    """A path's figure; a level that without arguments is NeMo's recipe has one run for both paths of this package."""
    return runs[level].get("level" if path == "same" and not LEVELS[level] else path)


def _cells(runs: _Runs, level: str, shown: Callable[[dict[str, Any]], str]) -> tuple[str, ...]:
    """The level, and a figure or an error of each path."""
    found = [_run(runs, level, path) for path in PATHS]
    return f"``{level}``", *("–" if f is None else failure(f) if "error" in f else shown(f) for f in found)


def _has_not_trained(figure: dict[str, Any]) -> bool:
    return figure["losses"][-1] > _STUCK * figure["losses"][0]


def _apart(of: dict[str, dict[str, Any]]) -> float | None:
    """The largest distance of a step's loss from that of NeMo's plugin."""
    losses = {path: f["losses"] for path, f in of.items() if "losses" in f}
    nemo = losses.pop("nemo", None)
    if nemo is None or not losses:
        return None
    return max(abs(a - b) for others in losses.values() for a, b in zip(nemo, others, strict=True))

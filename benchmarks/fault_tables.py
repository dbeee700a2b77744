"""The table of faults that runs survive."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.record import RESULTS, read
from benchmarks.rst import block, origin, simple_table

__all__ = ["FORMS", "faults"]

# Titles by the names in the results: keys of FAULTS in fault_kinds.py, and of STRATEGIES in fault_job.py.
_TITLES = {
    "kill": "SIGKILL of one process at any moment",
    "dead_before": "one process dead before gradients are averaged",
    "dead_after": "one process dead after that",
    "dead_writing": "one process dead while a checkpoint is written",
    "hang": "SIGSTOP of one process",
    "int_one": "SIGINT to one process",
    "int_all": "SIGINT to all processes",
    "term_one": "SIGTERM to one process",
    "term_all": "SIGTERM to all processes",
    "requeue": "SIGUSR1 of Slurm to all processes",
    "disk_full": "disk full while a checkpoint is written",
    "flipped": "a bit of the checkpoint flipped",
    "cut": "a file of the checkpoint cut short",
    "nan_before": "NaN on one process before gradients are averaged",
    "nan_after": "NaN on one process after that",
}
FORMS = {
    "ddp": "``ddp``", "lowprec_ddp": "``lowprec_ddp``", "sharded": "``lowprec_sharded``", "async": "the same, async",
    "megatron": "Megatron-core",
}  # fmt: skip


def faults(path: Path = RESULTS / "faults.jsonl") -> str:
    """Trials that were survived, from faults.jsonl."""
    origins, figures = read(path)
    found = {(f["fault"], f["form"]): f for f in figures if f["benchmark"] == "faults"}
    rows = []
    for fault, name in _TITLES.items():
        cells = [found.get((fault, form)) for form in FORMS]
        lost = [cell["lost_steps_max"] for cell in cells if cell and "lost_steps_max" in cell]
        rows.append((name, *map(_cell, cells), str(max(lost)) if lost else "–"))
    table = simple_table(("Fault", *FORMS.values(), "steps made again at most"), rows)
    survived, trials = (sum(f[key] for f in found.values()) for key in ("survived", "trials"))
    takeaway = f"Survived: {survived} of {trials}."
    costs = [(fault, f["lost_steps_max"]) for (fault, _), f in found.items() if "lost_steps_max" in f]
    if costs:
        after_term = max((cost for fault, cost in costs if fault.startswith("term")), default=0)
        takeaway += f" Steps made again: at most {max(cost for _, cost in costs)}, and after SIGTERM {after_term}."
    longest = max((f["seconds_max"] for f in found.values() if "seconds_max" in f), default=None)
    if longest is not None:
        takeaway += f" Every process had ended within {longest:.1f} s of the fault."
    return block(takeaway, table, origin(origins))


def _cell(figure: dict[str, Any] | None) -> str:
    if figure is None:
        return "–"
    of = f"{figure['survived']} of {figure['trials']}"
    if "refused" in figure:
        return f"{of}; {figure['refused']} refused"
    return f"{of}; {figure['seconds_max']:.1f} s" if "seconds_max" in figure else of

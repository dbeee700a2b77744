"""Tables of Muon, Lion and SGD: bytes a parameter, times of the step, losses."""

from __future__ import annotations

from typing import Any

from benchmarks.muon import BASELINE, OURS
from benchmarks.record import RESULTS, origins_of, read
from benchmarks.rst import block, milliseconds, origin, simple_table

__all__ = ["muon_bytes", "muon_parity", "muon_step"]

_RESULTS = RESULTS / "muon_h200.jsonl"
_TITLES = {"adamw": "AdamW", "muon": "Muon", "lion": "Lion", "sgd": "SGD, momentum"}


def _figures(benchmark: str) -> list[dict[str, Any]]:
    return [f for f in read(_RESULTS)[1] if f["benchmark"] == benchmark]


def _origin(benchmark: str) -> str:
    return origin(origins_of(_RESULTS, lambda f: f["benchmark"] == benchmark))


def muon_bytes() -> str:
    """Bytes a parameter of every optimizer, by column."""
    found = _figures("muon_bytes")
    by = {(f["optimizer"], f["states"]): f["bytes_per_param"] for f in found}
    takeaway = (
        f"Weights, gradients and states take {by['adamw', 'fp8+fp16']:.2f} bytes a parameter with AdamW,"
        f" {by['muon', 'fp8+fp16']:.2f} with Muon and {by['lion', 'fp8+fp16']:.2f} with Lion or SGD; with"
        f' ``states="fp8+fp8"`` {by["adamw", "fp8+fp8"]:.2f} with AdamW and {by["muon", "fp8+fp8"]:.2f} with Muon.'
    )
    rows = [
        (
            _TITLES[f["optimizer"]], f"``{f['states']}``", *(f"{size:.2f}" for size in f["by_column"].values()),
            f"{f['bytes_per_param']:.2f}",
        )
        for f in found
        if f["optimizer"] in ("adamw", "muon") or f["states"] == "fp8+fp16"  # the others have no second moment
    ]  # fmt: skip
    table = simple_table(("Optimizer", "States", *found[0]["by_column"], "all"), rows)
    return block(takeaway, table, _origin("muon_bytes"))


def muon_step() -> str:
    """The time of a step of every optimizer."""
    found = _figures("muon_step")
    by = {f["name"]: f for f in found}
    ours, torchs = by["nemo_lowprec Muon, O2"], by[BASELINE]
    takeaway = (
        f"Muon's step with states of {ours['state_bytes_per_param']:.2f} bytes a parameter takes {ours['ms']:.0f} ms,"
        f" and torch's with {torchs['state_bytes_per_param']:.2f} bytes {torchs['ms']:.0f} ms."
    )
    rows = [(f["name"], milliseconds(f, 2), f"{f['state_bytes_per_param']:.2f}") for f in found]
    table = simple_table(("Optimizer", "ms: median (min – max)", "state bytes/param"), rows)
    return block(takeaway, table, _origin("muon_step"))


def muon_parity() -> str:
    """The final losses, seed by seed."""
    runs = _figures("muon_parity")
    loss = {(f["name"], f["seed"]): f["val_loss"] for f in runs}
    seeds = sorted({f["seed"] for f in runs})
    gaps = {seed: (loss[OURS, seed] / loss[BASELINE, seed] - 1) * 100 for seed in seeds}
    takeaway = (
        f"After {runs[0]['steps']:,} steps the validation loss at ``msamp_o2`` is within"
        f" {max(map(abs, gaps.values())):.2f} % of the loss of torch's Muon in FP32, seed by seed."
    )
    rows = [
        (str(seed), f"{loss[BASELINE, seed]:.4f}", f"{loss[OURS, seed]:.4f}", f"{gaps[seed]:+.2f} %") for seed in seeds
    ]
    return block(takeaway, simple_table(("Seed", BASELINE, OURS, "distance"), rows), _origin("muon_parity"))

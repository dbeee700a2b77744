"""Errors of rounding in the operands and weights of watched runs, over all their samples: a figure a run.

    nemo-lowprec pretrain monitor=on monitor.every_n_steps=1 hydra.run.dir=runs/first
    python -m benchmarks.watched runs/first

A run is a folder with the file of ``PrecisionMonitor``. Of the inputs, the weights and the output gradients of all
layers a figure holds the extreme numbers of all samples and their steps, of the layers' weights the median share of
elements that an update did not change, by step. Figures of runs that are not named again stay.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.record import Record, arguments, earlier
from nemo_lowprec.report.monitor import read_run
from nemo_lowprec.report.monitor.runs import Run

_EXTREMES = {"sqnr": np.nanmin, "underflow": np.nanmax, "saturation": np.nanmax}


def operand(run: Run, kind: str) -> dict[str, Any]:
    """The extreme of each metric over the layers and samples, and the step of it."""
    rows = [row for row in run.operands.rows if row[1] == kind]
    found: dict[str, Any] = {}
    for metric, extreme in _EXTREMES.items():
        numbers = run.operands.metrics[metric].matrix(rows)
        most = extreme(numbers)
        layer, sample = np.argwhere(numbers == most)[0]
        found |= {metric: round(float(most), 4), f"{metric}_step": run.steps[sample], f"{metric}_at": rows[layer][0]}
    return found


def lost(run: Run) -> dict[str, float]:
    """The median share in percent over the weights of the layers with operands, by step."""
    weights = {f"{layer}.weight" for layer, _ in run.operands.rows}
    numbers = run.params.metrics["lost"].matrix([row for row in run.params.rows if row[0] in weights])
    columns = zip(run.steps, numbers.T, strict=True)
    return {str(step): round(float(np.nanmedian(of)), 4) for step, of in columns if not np.isnan(of).all()}


def main() -> None:
    parser = arguments(__doc__.split("\n")[0], "watched.jsonl")
    parser.add_argument("runs", nargs="+", type=Path, help="folders of runs")
    args = parser.parse_args()
    runs = [read_run(folder) for folder in args.runs]
    names = {(run.about["level"], run.about["parameters"], run.last_step) for run in runs}
    kept = [
        line for line in earlier(args.out, "watched")
        if (line.get("level"), line.get("parameters"), line.get("steps")) not in names
    ]  # fmt: skip
    record = Record(args.out, kept)
    for run in runs:
        about = {name: run.about[name] for name in ("level", "parameters", "device")}
        about |= {"steps": run.last_step, "samples": len(run.steps), "sampled": run.steps[:3]}
        kinds = dict.fromkeys(row[1] for row in run.operands.rows)
        record.add(benchmark="watched", **about, operands={kind: operand(run, kind) for kind in kinds}, lost=lost(run))


if __name__ == "__main__":
    main()

"""The page of one run: ``nemo-lowprec report``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from nemo_lowprec.report.curves import bin_starts
from nemo_lowprec.report.monitor.runs import Run, read_run
from nemo_lowprec.report.page.charts import Chart, bar_chart, curve, history_chart, line_chart, loss_chart
from nemo_lowprec.report.page.heatmaps import layer_maps, param_maps
from nemo_lowprec.report.page.page import page, write_page
from nemo_lowprec.report.page.profile_section import profile_section
from nemo_lowprec.report.page.said import told
from nemo_lowprec.report.page.words import METRICS, size

_NAME = "report.html"


def write_report(folder: str | Path, out: str | Path | None = None) -> Path:
    """Write the page of a run, and return the path of the file.

    Args:
        folder: of the run.
        out: the file; None: ``report.html`` in the folder.

    Raises:
        ValueError: there is no run in the folder, or no sample of it yet.
        MissingPackageError: a package that pages need is not installed.
    """
    run = read_run(folder)
    if not run.steps:
        every = run.about["every_n_steps"]
        raise ValueError(f"{folder} has no sample yet: a run takes the first one within {every} steps.")
    path = run.folder / _NAME if out is None else Path(out)
    write_page(path, run_page(run))
    return path


def run_page(run: Run) -> str:
    """The HTML of a run's page."""
    layers, params = layer_maps(run), param_maps(run)
    operands = [choice["title"] for choice in layers["choices"]]
    charts, shown = _charts(run, list(layers["values"]), operands), bool(params["choices"])
    profile = profile_section(run.folder)
    if profile is not None:
        charts["profile"] = profile.pop("chart")
    contents = {"charts": charts, "layers": layers, "params": params}
    said = told(run) | {"operands": operands, "profile": profile}
    return page("run.html", contents, charts=charts, params_shown=shown, **said)


def _charts(run: Run, metrics: list[str], operands: list[str]) -> dict[str, Chart]:
    charts: dict[str, Chart] = {}
    resumes = [attempt["start"] for attempt in run.attempts[1:]]
    if run.loss:
        steps = sorted(run.loss)
        found = curve(steps, np.array([run.loss[step] for step in steps]))
        charts["loss"] = loss_chart(found, run.val_losses, resumes)
    rates = [(step, tokens / seconds) for step, _, seconds, tokens in run.rates if tokens is not None]
    if rates:
        charts["rate"] = line_chart(_thinned(rates), "tokens a second", resumes=resumes)
    for metric in metrics:
        charts[f"history-{metric}"] = history_chart(METRICS[metric][0], metric, operands)
    totals = run.audit["total_bytes"] if run.audit else {}
    stored = [(name, total, size(total)) for name, total in totals.items() if total and name != "Comm"]
    if stored:
        charts["memory"] = bar_chart(stored)
    wire = [(sample["step"], sample["wire"]["sqnr"]) for sample in run.samples]
    if any(sqnr is not None for _, sqnr in wire):
        known = [(step, sqnr) for step, sqnr in wire if sqnr is not None]
        charts["wire"] = line_chart(_thinned(known), "SQNR", "dB", height=140, resumes=resumes)
    return charts


def _thinned(points: list[tuple[int, float]]) -> list[dict[str, Any]]:
    """Points of a line, at most 200 of them: the mean of each bin."""
    starts = bin_starts(len(points), 200)
    pieces = [points[first:last] for first, last in zip(starts, [*starts[1:], len(points)], strict=True)]
    means = [(piece[-1][0], float(np.mean([value for _, value in piece]))) for piece in pieces]
    return [{"step": step, "value": float(f"{value:.4g}")} for step, value in means]

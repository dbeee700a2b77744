"""Heatmaps of rows (layers, parameters) over the sampled steps: numbers that the page draws, and their charts.

A long run is thinned: a cell stands for several samples, and holds the worst one.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from nemo_lowprec.report.curves import Numbers, bin_starts
from nemo_lowprec.report.monitor.run_table import Row, Table
from nemo_lowprec.report.monitor.runs import Run
from nemo_lowprec.report.page.charts import Chart, chart
from nemo_lowprec.report.page.words import METRICS, OPERANDS, PARAM_METRICS

_NAME_HEIGHT = 11  # pixels
_COLUMNS = 200
_NUMBERS = 900_000  # of a page, which they make some 2 MB larger
_LOWEST_IS_WORST = ("sqnr", "scale", "weight_sqnr", "gradient_sqnr", "first_sqnr", "second_sqnr")
_ROW_HEIGHTS = ((40, 16), (70, 11), (200, 6), (10**6, 3))  # up to so many rows: so many pixels


def layer_maps(run: Run) -> dict[str, Any]:
    """The layers: an operand to choose, and for it one heatmap each of SQNR, underflow and saturation."""
    layers = list(dict.fromkeys(layer for layer, _ in run.operands.rows))
    metrics = [metric for metric in METRICS if metric in run.operands.metrics]
    if "nonfinite" in metrics and not _any(run.operands.matrix("nonfinite")):
        metrics.remove("nonfinite")
    operands = [operand for operand in OPERANDS if any(operand == found for _, found in run.operands.rows)]
    starts = _bins(run, len(metrics) * len(run.operands.rows))
    maps = _maps(run, layers, starts)
    maps["choices"] = [{"name": operand, "title": OPERANDS[operand]} for operand in operands]
    maps["panels"] = {metric: _panel(*METRICS[metric], layers, "layer") for metric in metrics[:3]}
    maps["shown"] = {operand: metrics[:3] for operand in operands}
    maps["values"] = {
        metric: {
            operand: _thinned(run.operands, metric, [(layer, operand) for layer in layers], starts)
            for operand in operands
        }
        for metric in metrics
    }
    return maps


def param_maps(run: Run) -> dict[str, Any]:
    """The parameters: a metric to choose, and one heatmap of the metric."""
    names = [name for (name,) in run.params.rows]
    metrics = [m for m in PARAM_METRICS if m in run.params.metrics and _any(run.params.matrix(m))]
    starts = _bins(run, len(metrics) * len(names))
    maps = _maps(run, names, starts)
    maps["choices"] = [{"name": metric, "title": PARAM_METRICS[metric][0]} for metric in metrics]
    maps["panels"] = {metric: _panel(*PARAM_METRICS[metric], names, "parameter") for metric in metrics}
    maps["shown"] = {metric: [metric] for metric in metrics}
    maps["values"] = {metric: {metric: _thinned(run.params, metric, run.params.rows, starts)} for metric in metrics}
    return maps


def short_names(names: Sequence[str]) -> list[str]:
    """Names without the words that all of them begin with, and without those that all end with."""
    words = [name.split(".") for name in names]
    for _ in range(2):  # the second time from the end
        while len(words) > 1 and all(len(w) > 1 and w[0] == words[0][0] for w in words):
            words = [w[1:] for w in words]
        words = [w[::-1] for w in words]
    return [".".join(w) for w in words]


def _any(values: Numbers) -> bool:
    return bool(np.isfinite(values).any() and np.nanmax(np.abs(values)) > 0)


def _bins(run: Run, rows: int) -> Any:
    return bin_starts(len(run.steps), min(_COLUMNS, max(20, _NUMBERS // max(rows, 1))))


def _maps(run: Run, names: list[str], starts: Any) -> dict[str, Any]:
    """Names of the rows, and of each column the first and last sampled step and the step at which the next begins."""
    ends = [*starts[1:], len(run.steps)]
    first = [run.steps[start] for start in starts]
    last = [run.steps[end - 1] for end in ends]
    width = max(1, (run.steps[-1] - run.steps[0]) // max(len(run.steps) - 1, 1))
    return {"rows": names, "first": first, "last": last, "next": [*first[1:], last[-1] + width] if first else []}


def _thinned(table: Table, metric: str, rows: Sequence[Row], starts: Any) -> list[list[float | None]]:
    places = {row: index for index, row in enumerate(table.rows)}
    blank = np.full((1, len(starts)), np.nan)
    worst = np.fmin if metric in _LOWEST_IS_WORST else np.fmax
    found = np.concatenate([worst.reduceat(table.matrix(metric), starts, axis=1), blank])
    numbers = found[[places.get(row, -1) for row in rows]]
    return [[float(f"{v:.3g}") if v == v else None for v in row] for row in numbers.tolist()]


def _panel(title: str, unit: str, names: list[str], noun: str) -> dict[str, Any]:
    ratio = unit == "dB"
    scale: Chart = (
        {"domain": [40, 0], "clamp": True, "range": "ramp"}
        if ratio
        else {"type": "sqrt", "domain": [0, 100], "clamp": True, "range": "heatmap"}
    )
    values = [40, 30, 20, 10, 0] if ratio else [0, 1, 10, 50, 100]
    return {"title": title, "unit": unit, "chart": _heatmap(f"{title}, {unit}", names, noun, scale, values)}


def _first_of_blocks(names: list[str], apart: int) -> dict[str, str]:
    """The first name of each block, and the last two words of the block's name.

    A block is what agrees up to its first number; a name without a number is a block of its own. Of two blocks that
    begin fewer than ``apart`` rows apart the larger one has a name.
    """
    blocks: dict[str, list[int]] = {}
    for row, name in enumerate(names):
        found = re.match(r".*?\.\d+(?=\.|$)", name)
        blocks.setdefault(found[0] if found else name, []).append(row)
    named: dict[int, str] = {}
    for block, rows in sorted(blocks.items(), key=lambda item: -len(item[1])):
        if all(abs(rows[0] - other) >= apart for other in named):
            named[rows[0]] = ".".join(block.split(".")[-2:])
    return {names[row]: block for row, block in sorted(named.items())}


def _heatmap(title: str, names: list[str], noun: str, scale: Chart, ticks: list[int]) -> Chart:
    height = next(pixels for rows, pixels in _ROW_HEIGHTS if len(names) <= rows)
    label: dict[str, Any] = {"labelExpr": "labels[datum.value]", "labelOverlap": False, "title": None, "grid": False}
    labels = dict(zip(names, short_names(names), strict=True))
    if height < _NAME_HEIGHT:  # the first row of each block has the block's name
        labels = _first_of_blocks(names, math.ceil(_NAME_HEIGHT / height))
        label["values"] = list(labels)
    y = {"field": "row", "type": "nominal", "sort": None, "scale": {"domain": names}, "axis": label}
    axis = {"title": None, "tickCount": 4, "format": ",d", "orient": "top", "grid": False}
    round_ = {"nice": False, "zero": False, "round": True}
    x = {"field": "first", "type": "quantitative", "scale": round_, "axis": axis}
    # On top: below a map that is scrolled the legend would be out of sight.
    legend = {"orient": "top", "title": None, "values": ticks, "offset": 8}
    legend |= {"gradientLength": 180, "gradientThickness": 8}
    colour = {"field": "value", "type": "quantitative", "scale": scale, "legend": legend}
    tooltip = [
        {"field": "row", "title": noun},
        {"field": "steps", "title": "step"},
        {"field": "value", "title": title},
    ]
    hand = {"cursor": "pointer"} if noun == "layer" else {}  # a click on a layer shows its history
    return chart(
        height * len(names),
        {"mark": {"type": "rect", **hand}, "encoding": {"color": colour, "tooltip": tooltip}},
        {
            "transform": [{"filter": "datum.column === 0"}],
            "mark": {"type": "rect", "filled": False, "strokeWidth": 1.5, "stroke": {"expr": "ink"}},
            "encoding": {
                "x2": {"field": "end"},
                "opacity": {"condition": {"test": "datum.row === chosen", "value": 1}, "value": 0},
            },
        },
        data={"name": "cells"},
        params=[
            {"name": "chosen", "value": ""},
            {"name": "labels", "value": labels},
        ],
        encoding={"y": y, "x": x, "x2": {"field": "next"}},
    )

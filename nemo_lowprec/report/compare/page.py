"""The page of a comparison."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from typing import Any

import numpy as np

from nemo_lowprec.report.compare.comparison import Comparison, Outcome
from nemo_lowprec.report.compare.intervals import half_width
from nemo_lowprec.report.compare.words import HEADINGS, cells, sentences
from nemo_lowprec.report.curves import Numbers, bin_starts, window_of
from nemo_lowprec.report.page.charts import Chart, bar_chart, chart, step_axis
from nemo_lowprec.report.page.page import page
from nemo_lowprec.report.page.said import spoiled
from nemo_lowprec.report.page.words import count, parameters, size
from nemo_lowprec.report.spoiled import crossings

_POINTS = 300


def comparison_page(comparison: Comparison) -> str:
    """The HTML of a comparison."""
    outcomes, about = comparison.outcomes, comparison.outcomes[0].group.runs[0].about
    charts = _charts(outcomes)
    labels = [outcome.group.label for outcome in outcomes]
    steps = max(outcome.steps[-1] for outcome in outcomes)
    runs = [run for outcome in outcomes for run in outcome.group.runs]
    summary = (
        f"{about['model']} of {parameters(about['parameters'])} parameters, {count(steps, 'step')} on "
        f"{about['device']}; {count(len(runs), 'run')} in all."
    )
    return page(
        "compare.html",
        {"charts": charts},
        charts=charts,
        title=f"{', '.join(labels)}: a comparison of levels",
        summary=summary,
        comparison=comparison,
        labels=labels,
        headings=HEADINGS,
        rows=[[cell.replace("\n", " ") for cell in cells(outcome)] for outcome in outcomes],
        sentences=sentences(comparison),
        window=window_of(len(outcomes[0].steps)),
        spoiled={outcome.group.label: spoiled(crossings(outcome.group.runs[0])) for outcome in outcomes},
        runs=runs,
    )


def _charts(outcomes: list[Outcome]) -> dict[str, Chart]:
    labels = [outcome.group.label for outcome in outcomes]
    losses = [_points(o, o.losses, lambda n: (n.min(axis=0), n.max(axis=0))) for o in outcomes]
    charts = {"losses": _bands(list(chain(*losses)), labels)}
    gaps = [_points(o, o.gaps, _interval) for o in outcomes if o.gaps is not None]
    if gaps:
        charts["gaps"] = _bands(list(chain(*gaps)), labels, about_zero=True)
    bars: dict[str, tuple[str, Callable[[Any], str]]] = {
        "rates": ("tokens_per_second", lambda value: f"{value:,.0f}"),
        "peaks": ("peak_bytes", size),
        "bytes": ("bytes_per_param", lambda value: f"{value:.2f}"),
    }
    for name, (field, text) in bars.items():
        known = [(o.group.label, getattr(o, field)) for o in outcomes if getattr(o, field) is not None]
        if known:
            charts[name] = bar_chart([(label, value, text(value)) for label, value in known], labels)
    return charts


def _interval(gaps: Numbers) -> tuple[Numbers, Numbers]:
    half = half_width(gaps) if len(gaps) > 1 else np.zeros(gaps.shape[1:])
    return gaps.mean(axis=0) - half, gaps.mean(axis=0) + half


def _points(
    outcome: Outcome, numbers: Numbers, band: Callable[[Numbers], tuple[Numbers, Numbers]]
) -> list[dict[str, Any]]:
    """Points of the mean over the seeds, with the ends of its band."""
    low, high = band(numbers)
    at = np.unique([*bin_starts(len(outcome.steps), _POINTS), len(outcome.steps) - 1])
    columns = zip([outcome.steps[i] for i in at], numbers.mean(axis=0)[at], low[at], high[at], strict=True)
    return [
        {"level": outcome.group.label, "step": step}
        | {name: float(f"{value:.5g}") for name, value in zip(("mean", "low", "high"), values, strict=True)}
        for step, *values in columns
    ]


def _bands(points: list[dict[str, Any]], labels: list[str], about_zero: bool = False) -> Chart:
    """A line with a band for each level; a level has the same colour in all charts.

    Args:
        points: see ``_points``.
        labels: of all levels.
        about_zero: whether zero has a rule. Otherwise the axis ends where the lines are after a tenth of the steps: a
            loss begins so high that the levels would lie on one line.
    """
    scale: Chart = {"zero": about_zero}
    if not about_zero:
        last = max(point["step"] for point in points)
        late = [point for point in points if point["step"] >= last / 10]
        scale |= {"domain": [min(point["low"] for point in late), max(point["high"] for point in late)]}
    y = {"type": "quantitative", "title": None, "scale": scale}
    colour = {"field": "level", "type": "nominal", "scale": {"domain": labels}, "legend": None}
    fields = [{"field": "level"}, {"field": "step", "format": ",d"}]
    tooltip = [*fields, *({"field": name} for name in ("mean", "low", "high"))]
    x = step_axis()
    zero = {"data": {"values": [{}] if about_zero else []}, "mark": {"type": "rule", "color": {"expr": "quiet"}}}
    area = {"mark": {"type": "area", "opacity": 0.16, "clip": True}}
    line = {"mark": {"type": "line", "clip": True}}
    return chart(
        300,
        zero | {"encoding": {"y": {"datum": 0}}},
        area | {"encoding": {"x": x, "y": {"field": "low", **y}, "y2": {"field": "high"}, "color": colour}},
        line | {"encoding": {"x": x, "y": {"field": "mean", **y}, "color": colour, "tooltip": tooltip}},
        data={"values": points},
    )

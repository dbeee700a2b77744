"""Charts of a page, in Vega-Lite's own JSON. Colours and fonts are the page's: see ``config`` in page.js."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from nemo_lowprec.report.curves import Numbers, bin_starts, smoothed
from nemo_lowprec.report.page.words import folded

Chart = dict[str, Any]

_POINTS = 300  # that a line has at most
_LABEL, _LINE = 26, 12  # letters of a line beside a bar, and pixels of its height
_NO_ZERO = {"zero": False}


def chart(height: int, *layers: Chart, **parts: Any) -> Chart:
    """A chart as wide as its place."""
    size = {"width": "container", "height": height, "autosize": {"type": "fit-x", "contains": "padding"}}
    # A layer without data would have no extent.
    return {**size, "layer": [one for one in layers if one.get("data", {}).get("values") != []], **parts}


def step_axis(title: str | None = "step") -> Chart:
    """The encoding of steps along x."""
    axis = {"title": title, "tickCount": 5, "format": ",d", "grid": False}
    return {"field": "step", "type": "quantitative", "axis": axis, "scale": {"nice": False}}


def curve(steps: Sequence[int], values: Numbers) -> list[dict[str, Any]]:
    """Points of a curve of one number a step: in each bin the smallest and the largest one, and the smoothed curve."""
    starts = bin_starts(len(steps), _POINTS)
    low, high = (part.reduceat(values, starts) for part in (np.minimum, np.maximum))
    middle = [(first + last) // 2 for first, last in zip(starts, [*starts[1:], len(steps)], strict=True)]
    mean = smoothed(values)[middle]
    points = zip([steps[m] for m in middle], low, high, mean, strict=True)
    return [{"step": s, "low": _short(lo), "high": _short(hi), "mean": _short(m)} for s, lo, hi, m in points]


def loss_chart(
    points: list[dict[str, Any]], validations: Sequence[tuple[int, float]], resumes: Sequence[int]
) -> Chart:  # fmt: skip
    """The smoothed loss, the range of the single steps behind it, validations as dots, resumes as rules."""
    y = {"type": "quantitative", "scale": _NO_ZERO, "title": None}
    named = {"mean": "training, smoothed", "low": "lowest step", "high": "highest step"}
    tooltip = [{"field": "step", "format": ",d"}, *({"field": f, "title": t} for f, t in named.items())]
    return chart(
        240,
        {
            "mark": {"type": "area", "opacity": 0.18},
            "encoding": {"y": {"field": "low", **y}, "y2": {"field": "high"}},
        },
        {"mark": {"type": "line"}, "encoding": {"y": {"field": "mean", **y}, "tooltip": tooltip}},
        _resumes(resumes),
        {
            "data": {"values": [{"step": step, "loss": loss} for step, loss in validations]},
            "mark": {"type": "point", "filled": True, "size": 45, "color": {"expr": "second"}},
            "encoding": {
                "y": {"field": "loss", **y},
                "tooltip": [{"field": "step", "format": ",d"}, {"field": "loss", "title": "validation"}],
            },
        },
        data={"values": points},
        encoding={"x": step_axis()},
    )


def line_chart(
    points: list[dict[str, Any]], title: str, unit: str = "", height: int = 240, resumes: Sequence[int] = ()
) -> Chart:
    """One line of ``value`` over ``step``, from zero on, with the last value at its end."""
    tooltip = [{"field": "step", "format": ",d"}, {"field": "value", "title": f"{title} {unit}".rstrip()}]
    y = {"field": "value", "type": "quantitative", "title": None, "axis": {"format": ",~f", "tickCount": 4}}
    return chart(
        height,
        {"mark": {"type": "line", "point": len(points) <= 30}, "encoding": {"y": y, "tooltip": tooltip}},
        _resumes(resumes),
        data={"values": points},
        encoding={"x": step_axis()},
    )


def bar_chart(bars: Sequence[tuple[str, float, str]], coloured: Sequence[str] = ()) -> Chart:
    """Horizontal bars, at most ten.

    Args:
        bars: the name of each, its length, and what is written at its end.
        coloured: names in the order of the page's colours; none: all bars have one colour.
    """
    values = [{"name": name, "value": value, "text": text} for name, value, text in bars]
    lines = {name: folded(name, _LABEL) for name, _, _ in bars}
    axis: Chart = {"labelExpr": "lines[datum.value]", "labelLimit": 180, "labelLineHeight": _LINE, "grid": False}
    # Vega puts the first line beside the middle of the bar.
    further = "length(lines[datum.value]) - 1"
    axis["labelOffset"] = {"condition": {"test": f"{further} > 0", "expr": f"{-_LINE / 2} * ({further})"}, "value": 0}
    y = {"field": "name", "type": "nominal", "sort": None, "title": None, "axis": axis}
    colour = {"field": "name", "type": "nominal", "scale": {"domain": list(coloured)}, "legend": None}
    top = max((value for _, value, _ in bars), default=0) * 1.45  # room for the text
    x = {"field": "value", "type": "quantitative", "axis": None, "scale": {"domain": [0, top or 1]}}
    return chart(
        max([28, *(_LINE * len(of_name) + 4 for of_name in lines.values())]) * len(bars),
        {
            "mark": {"type": "bar", "height": 14, "cornerRadiusEnd": 2},
            "encoding": {"color": colour} if coloured else {},
        },
        {
            "mark": {"type": "text", "align": "left", "dx": 6},
            "encoding": {"text": {"field": "text"}},
        },
        data={"values": values},
        params=[{"name": "lines", "value": lines}],
        encoding={"y": y, "x": x},
    )


def stacked_chart(pieces: Sequence[tuple[str, str, float]], parts: Sequence[str], unit: str) -> Chart:
    """Horizontal bars of coloured pieces.

    Args:
        pieces: the bar of each, the part, and its length.
        parts: in the order of the page's colours, and from left to right.
        unit: of the lengths.
    """
    values = [
        {"bar": bar, "part": part, "value": float(f"{value:.4g}"), "order": parts.index(part)}
        for bar, part, value in pieces
    ]
    y = {"field": "bar", "type": "nominal", "sort": None, "title": None, "axis": {"labelLimit": 260, "grid": False}}
    return chart(
        44 * len({bar for bar, _, _ in pieces}),
        {"mark": {"type": "bar", "height": 24}},
        data={"values": values},
        encoding={
            "y": y,
            "x": {"field": "value", "type": "quantitative", "title": unit, "axis": {"tickCount": 8}},
            "color": {"field": "part", "type": "nominal", "scale": {"domain": list(parts)}, "legend": None},
            "order": {"field": "order"},
            "tooltip": [{"field": "bar"}, {"field": "part"}, {"field": "value", "title": unit}],
        },
    )


def history_chart(title: str, metric: str, operands: Sequence[str]) -> Chart:
    """One metric of one layer, a line for each operand; the page fills in ``history``."""
    log = metric in ("amax", "scale")
    scale: Mapping[str, Any] = {"type": "log", "nice": False} if log else _NO_ZERO if metric == "binades" else {}
    axis = {"tickCount": 3, "format": ".0e" if log else ".3~g"}
    y = {"field": "value", "type": "quantitative", "title": None, "scale": scale, "axis": axis}
    names = {"field": "operand", "type": "nominal", "scale": {"domain": list(operands)}, "legend": None}
    tooltip = [{"field": "operand"}, {"field": "step", "format": ",d"}, {"field": "value", "title": title}]
    return chart(
        130,
        {"mark": {"type": "line"}},
        {"mark": {"type": "point", "filled": True, "size": 12}},
        data={"name": "history"},
        encoding={"x": step_axis(None), "y": y, "color": names, "tooltip": tooltip},
    )


def _resumes(steps: Sequence[int]) -> Chart:
    rule = {"type": "rule", "strokeDash": [3, 3], "opacity": 0.7, "color": {"expr": "quiet"}}
    values = [{"step": step, "text": "resumed here"} for step in steps]
    return {"data": {"values": values}, "mark": rule, "encoding": {"tooltip": [{"field": "text"}]}}


def _short(value: float) -> float:
    return float(f"{value:.5g}")

"""The documents' pictures: what each one shows, as data, and the code that draws it (with matplotlib).

A picture has at most ``MOST`` bars, lines or rows of dots. Colours are those of Okabe and Ito, which readers with any
colour vision tell apart: this project's bars are blue, those of other packages grey.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.rst import prose

__all__ = ["LINES", "MOST", "OTHERS", "OURS", "Bar", "Bars", "Dots", "Line", "Lines", "Panel", "Picture", "bars"]

MOST = 10
OURS, OTHERS, BLACK = "#0072B2", "#999999", "#000000"
LINES = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
DASHES = ("-", "--", "-.", ":", (0, (5, 1)), (0, (3, 1, 1, 1, 1, 1)))
MARKERS = "os^D"


@dataclass(frozen=True)
class Bar:
    """A horizontal bar: its name in words, its length, and what is written at its end."""

    label: str
    value: float
    text: str
    ours: bool


@dataclass(frozen=True)
class Bars:
    """Bars, the first one on top."""

    xlabel: str
    bars: tuple[Bar, ...]

    @property
    def marks(self) -> int:
        return len(self.bars)

    @property
    def colours(self) -> list[dict[str, str]]:
        """Name to colour, for each group whose colours must differ."""
        return [{"nemo_lowprec": OURS, "other packages": OTHERS}]

    @property
    def alt(self) -> str:
        ends = "; ".join(f"{bar.label} {bar.text}" for bar in self.bars).replace("\n", " ")
        return f"Bars of {self.xlabel}: {ends}".replace("\n", ", ")

    def draw(self, plt: Any) -> Any:
        figure, axes = plt.subplots(figsize=(10, 0.52 * self.marks + 1.6))
        rows = self.bars[::-1]
        (colours,) = self.colours
        drawn = axes.barh(
            range(len(rows)), [bar.value for bar in rows], height=0.7,
            color=[colours["nemo_lowprec" if bar.ours else "other packages"] for bar in rows],
        )  # fmt: skip
        axes.set_yticks(range(len(rows)), [bar.label for bar in rows])
        axes.bar_label(drawn, [bar.text for bar in rows], padding=4)
        axes.set_xlabel(self.xlabel)
        axes.set_xlim(right=1.45 * max(bar.value for bar in rows))
        axes.locator_params(axis="x", nbins=4)
        axes.xaxis.set_major_formatter("{x:,.10g}")
        patches = [plt.Rectangle((0, 0), 1, 1, color=colour) for colour in colours.values()]
        figure.legend(patches, list(colours), loc="outside lower center", ncols=2)
        return figure


@dataclass(frozen=True)
class Line:
    label: str
    ys: tuple[float, ...]
    colour: str
    behind: bool = False  # drawn broad, for others to lie on


@dataclass(frozen=True)
class Panel:
    """Axes of a picture: its lines have the same ``xs``."""

    title: str
    ylabel: str
    xs: tuple[float, ...]
    lines: tuple[Line, ...]
    limit: float | None = None  # the axis goes from -limit to limit
    band: float | None = None  # half the width of what is shaded around zero


@dataclass(frozen=True)
class Lines:
    """Panels side by side, with one legend."""

    xlabel: str
    panels: tuple[Panel, ...]
    alt: str
    sharey: bool = False

    @property
    def marks(self) -> int:
        return sum(len(panel.lines) for panel in self.panels)

    @property
    def colours(self) -> list[dict[str, str]]:
        return [{line.label: line.colour for line in panel.lines} for panel in self.panels]

    def draw(self, plt: Any) -> Any:
        figure, all_axes = plt.subplots(1, len(self.panels), figsize=(10, 4.6), sharey=self.sharey, squeeze=False)
        for axes, panel in zip(all_axes[0], self.panels, strict=True):
            if panel.limit is not None:
                axes.set_ylim(-panel.limit, panel.limit)
                axes.axhline(0, color=BLACK, linewidth=0.6)
            if panel.band is not None:
                axes.axhspan(-panel.band, panel.band, color="#DDDDDD", zorder=0)
            for line in panel.lines:
                dash = "-" if line.behind else DASHES[LINES.index(line.colour)]
                width = 5 if line.behind else 1.8
                axes.plot(panel.xs, line.ys, label=line.label, color=line.colour, linewidth=width, linestyle=dash)
            axes.set(title=panel.title, xlabel=self.xlabel, ylabel=panel.ylabel)
        names: dict[str, Any] = {}
        for axes in all_axes[0]:
            handles, labels = axes.get_legend_handles_labels()
            names |= dict(zip(labels, handles, strict=True))
        figure.legend(list(names.values()), list(names), loc="outside lower center", ncols=2, handlelength=3.5)
        return figure


@dataclass(frozen=True)
class Dots:
    """A row of dots for each name, one dot a seed, with their mean as a stroke; ``band`` is shaded around zero."""

    xlabel: str
    rows: Mapping[str, Mapping[int, float]]
    alt: str
    band: tuple[float, str] | None = None  # half its width, and what it is

    @property
    def marks(self) -> int:
        return len(self.rows)

    @property
    def colours(self) -> list[dict[str, str]]:
        seeds = sorted({seed for row in self.rows.values() for seed in row})
        return [{f"seed {seed}": colour for seed, colour in zip(seeds, LINES, strict=False)}]

    def draw(self, plt: Any) -> Any:
        figure, axes = plt.subplots(figsize=(10, 0.45 * self.marks + 1.7))
        axes.axvline(0, color=BLACK, linewidth=0.6)
        if self.band is not None:
            axes.axvspan(-self.band[0], self.band[0], color="#DDDDDD", label=self.band[1], zorder=0)
        names = list(self.rows)[::-1]
        (colours,) = self.colours
        for marker, (name, colour) in zip(MARKERS, colours.items(), strict=False):
            seed = int(name.split()[1])
            at = [(self.rows[row][seed], i) for i, row in enumerate(names) if seed in self.rows[row]]
            axes.scatter(*zip(*at, strict=True), color=colour, marker=marker, s=45, label=name, zorder=3)
        means = [sum(self.rows[row].values()) / len(self.rows[row]) for row in names]
        axes.scatter(means, range(len(names)), color=BLACK, marker="|", s=300, linewidth=2, label="mean", zorder=4)
        axes.set_yticks(range(len(names)), names)
        axes.set_ylim(-0.6, len(names) - 0.4)
        axes.set_xlabel(self.xlabel)
        figure.legend(loc="outside lower center", ncols=6, handletextpad=0.3)
        return figure


@dataclass(frozen=True)
class Picture:
    """A file in benchmarks/results, the sentence that says what to see, and which contestants it has."""

    file: str
    see: str
    shown: str
    data: Bars | Lines | Dots

    def __post_init__(self) -> None:
        if self.data.marks > MOST:
            raise ValueError(f"{self.file} has {self.data.marks} bars, lines or rows, and {MOST} are what can be read.")

    def digest(self) -> str:
        """Digest of the data, kept in the file: a test finds a picture that is older than its figures."""
        return hashlib.sha256(repr(self.data).encode()).hexdigest()

    def rst(self, folder: str) -> str:
        """reStructuredText: the takeaway, the picture with its alternative text, and the contestants that it shows."""
        image = f".. image:: {folder}/{self.file}\n   :alt: {self.data.alt}"
        return "\n\n".join((prose(self.see), image, prose(self.shown)))

    def draw(self, results: Path) -> None:
        """Write the file."""
        import matplotlib

        matplotlib.use("Agg")
        import matplotlib.pyplot as plt

        with plt.rc_context({"font.size": 12, "axes.spines.top": False, "axes.spines.right": False}):
            figure = self.data.draw(plt)
            figure.set_layout_engine("constrained")
            figure.savefig(results / self.file, dpi=160, metadata={"Comment": self.digest()})
            plt.close(figure)


def bars(xlabel: str, figures: Sequence[dict[str, Any]], labels: Mapping[str, str]) -> Bars:
    """Tokens/s, and GiB at the peak, of the figures that ``labels`` names, each under its label."""
    rows = sorted((f for f in figures if f["name"] in labels), key=lambda f: -f["tokens_per_s"])
    ends = [f"{f['tokens_per_s']:,} ({f['peak_gib']:.0f} GiB)" for f in rows]
    return Bars(
        xlabel,
        tuple(
            Bar(labels[f["name"]], f["tokens_per_s"], end, labels[f["name"]].startswith("nemo_lowprec"))
            for f, end in zip(rows, ends, strict=True)
        ),
    )

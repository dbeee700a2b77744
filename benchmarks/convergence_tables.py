"""Tables and a picture of the convergence at length, from convergence_h200.jsonl."""

from __future__ import annotations

import statistics
from typing import Any

from benchmarks.convergence_gaps import BASELINE, ENOUGH, TWIN, chance_by_length, gaps_at_length, paired, percent
from benchmarks.convergence_run import BATCH, EVERY, SEQUENCE, STEPS, Spec
from benchmarks.pictures import LINES, OTHERS, Line, Lines, Panel, Picture
from benchmarks.record import RESULTS, read
from benchmarks.rst import block, origin, simple_table
from nemo_lowprec.chart import CHART

__all__ = ["GOAL", "ablation", "by_kind", "chance", "curves_picture", "gaps", "runs"]

GOAL = 0.3  # percent
_VARIANTS = {"twin": "another first weight", "stochastic": "stochastic rounding", "coarse": "coarse scaling"}
_FILE = RESULTS / "convergence_h200.jsonl"


def runs() -> dict[Spec, dict[str, Any]]:
    """The runs that ended, in the chart's order.

    Raises:
        ValueError: runs of different texts, whose losses cannot be compared.
    """
    found = {Spec.parse(f["run"]): f for f in read(_FILE)[1] if f["benchmark"] == "convergence"}
    texts = {run["text"] for run in found.values()}
    if len(texts) > 1:
        raise ValueError(f"{_FILE.name} has runs of the texts {', '.join(sorted(texts))}: keep those of one text.")
    return dict(sorted(found.items(), key=lambda item: (list(CHART).index(item[0].level), str(item[0]))))


def _whole() -> dict[str, dict[str, Any]]:
    """The whole runs with seed 0 by their row: the baseline's, its twin's, each level's and variant's."""
    return {spec.row: run for spec, run in runs().items() if spec.seed == 0 and spec.is_whole}


def _name(row: str, mark: str = "") -> str:
    level, _, variant = row.partition("+")
    return f"{mark}{level}{mark}" + (f" with {_VARIANTS[variant]}" if variant else "")


def _shown(row: str) -> str:
    return _name(row, "``")


def gaps() -> str:
    """Gaps at the end and their growth."""
    found = gaps_at_length(runs())
    levels = {row: gap for row, gap in found.items() if row != TWIN}
    furthest = max(levels, key=lambda row: abs(levels[row].percent))
    grown = [row for row, gap in found.items() if gap.growth > gap.growth_half]
    growth = "no gap grew" if not grown else f"the gap of {' and of '.join(map(_shown, grown))} grew"
    base = _whole()[BASELINE]
    widest = max(gap.half for gap in levels.values())
    takeaway = (
        f"After {_millions(STEPS)} tokens ``{BASELINE}`` with seed 0 has a loss of {base['loss']:.4f}. The gaps to "
        f"``{BASELINE}`` are at most {abs(levels[furthest].percent):.2f} % ({_shown(furthest)}). The goal is {GOAL} %; "
        f"the widest interval is ± {widest:.2f} %. Over the second half of the training {growth} by more than its "
        "interval."
    )
    rows = [
        (
            _shown(row), str(gap.seeds), f"{gap.percent:+.2f} ± {gap.half:.2f}",
            f"{gap.growth:+.2f} ± {gap.growth_half:.2f}",
        )
        for row, gap in found.items()
    ]  # fmt: skip
    return block(takeaway, simple_table(("Level", "seeds", "gap, %", "growth, points"), rows), origin(read(_FILE)[0]))


def by_kind() -> str:
    """Accuracy of the next token by its kind at the baseline, and the differences of the levels and the twin."""
    pairs = paired(runs())

    def apart(row: str, kind: str) -> float:
        """Mean over seeds, in points."""
        kinds = [(run["by_kind"][kind], base["by_kind"][kind]) for run, base in pairs[row]]
        return 100 * statistics.mean(run["accuracy"] - base["accuracy"] for run, base in kinds)

    levels = [row for row in pairs if row in CHART]
    twins = [row for row in pairs if row == TWIN]
    base = _whole()[BASELINE]["by_kind"]
    most, at, of = max((abs(apart(level, kind)), level, kind) for level in levels for kind in base)
    takeaway = f"Accuracies differ by at most {most:.2f} points from ``{BASELINE}``'s: {of} at ``{at}``."
    rows = []
    for kind, figures in base.items():
        points = [apart(level, kind) for level in levels]
        rows.append((
            kind, f"{figures['tokens']:,}", f"{100 * figures['accuracy']:.2f}",
            f"{min(points):+.2f} to {max(points):+.2f}", *(f"{apart(twin, kind):+.2f}" for twin in twins),
        ))  # fmt: skip
    header = (
        "Kind of token",
        "tokens",
        f"``{BASELINE}``, %",
        "levels, points",
        *(_VARIANTS["twin"] for _ in twins),
    )
    return block(takeaway, simple_table(header, rows))


def chance() -> str:
    """The standard deviation of a gap by chance, by the length of runs that leave a degree of freedom."""
    found = {steps: of for steps, of in chance_by_length(runs()).items() if of.freedom}
    parts = [f"{of.deviation:.2f} % after {_millions(steps)}" for steps, of in found.items() if of.freedom >= ENOUGH]
    takeaway = f"Chance moves the gap of one pair of runs by a standard deviation of {', and '.join(parts)} tokens."
    rows = [
        (
            _millions(steps), str(of.runs), f"{of.deviation:.2f}", str(of.freedom),
            ", ".join(f"{of.twins[seed]:+.2f}" for seed in sorted(of.twins)),
        )
        for steps, of in found.items()
    ]  # fmt: skip
    header = ("Tokens a run", "runs", "deviation, %", "degrees of freedom", f"gaps of second ``{BASELINE}`` runs, %")
    return block(takeaway, simple_table(header, rows))


def _millions(steps: int) -> str:
    return f"{steps * SEQUENCE * BATCH / 1e6:.0f} M"


def ablation() -> str:
    """The run whose scaling is made coarse, beside the level as it is and the baseline, at the step where it ends."""
    found, whole = runs(), _whole()
    spec = next(spec for spec in found if spec.variant == "coarse")
    at = str(spec.stop)
    base = whole[BASELINE]["validations"][at]
    coarse, usual = (of["validations"][at] for of in (found[spec], whole[spec.level]))
    return block(
        f"With coarse scaling the gap of ``{spec.level}`` is {percent(coarse, base):+.2f} % after {spec.stop:,} steps, "
        f"and {percent(usual, base):+.2f} % with the level's own.",
        simple_table(
            ("Run", f"validation loss after {spec.stop:,} steps", "gap, %"),
            [
                (_shown(BASELINE), f"{base:.4f}", ""),
                (_shown(spec.level), f"{usual:.4f}", f"{percent(usual, base):+.2f}"),
                (_shown(spec.row), f"{coarse:.4f}", f"{percent(coarse, base):+.2f}"),
            ],
        ),
    )


def curves_picture() -> Picture:
    """Training losses, and the gaps of validation losses with the band of chance."""
    whole = _whole()
    found = {row: gap for row, gap in gaps_at_length(runs()).items() if row in CHART or row == TWIN}
    half = round(max(gap.half for gap in found.values()), 2)
    colours = dict(zip(found, LINES, strict=False))
    base = whole[BASELINE]["train_loss"]
    losses = [Line(BASELINE, tuple(base), OTHERS, behind=True)]
    losses += [Line(_name(row), tuple(whole[row]["train_loss"]), colours[row]) for row in found if row in CHART]
    steps = [int(step) for step in whole[BASELINE]["validations"] if int(step) >= STEPS // 10]
    apart = tuple(
        Line(_name(row), tuple(gap.curve[step] for step in steps), colours[row]) for row, gap in found.items()
    )
    furthest = max(abs(y) for line in apart for y in line.ys)
    limit = round(1.2 * max(furthest, half, GOAL), 2)
    xs = tuple(float(EVERY * (i + 1)) for i in range(len(base)))
    panels = (
        Panel("Training loss", "nats a token", xs, tuple(losses)),
        Panel(f"Gap of the validation loss to {BASELINE}, %", "", tuple(map(float, steps)), apart, limit, half),
    )
    see = (
        f"The curves of the training loss overlap; the gaps of the validation losses stay within {furthest:.2f} %. The "
        f"band is ± {half:.2f} %: a gap within it can be chance."
    )
    means = ", ".join(f"{gap.later:+.2f} % ({_shown(row)})" for row, gap in found.items())
    shown = (
        f"Lines: the mean loss of every {EVERY} steps (seed 0), and gaps to ``{BASELINE}`` (mean of the seeds) from a "
        f"tenth of the training on. Means of the gaps over the second half: {means}."
    )
    names = ", ".join(line.label for line in apart)
    alt = (
        f"Left: overlapping curves of the training loss. Right: gaps of {names} to {BASELINE} in percent, within "
        f"{furthest:.2f}, and a band of {half:.2f} around zero."
    )
    return Picture("convergence_h200.png", see, shown, Lines("step", panels, alt))

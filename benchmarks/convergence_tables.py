"""Tables and a picture of the convergence at length, from convergence_h200.jsonl."""

from __future__ import annotations

from typing import Any

from benchmarks.convergence_gaps import BASELINE, ENOUGH, TWIN, chance_by_length, gaps_at_length, percent
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
    return f"{mark}{level}{mark}" + (f", {_VARIANTS[variant]}" if variant else "")


def _shown(row: str) -> str:
    return _name(row, "``")


def gaps() -> str:
    """Final losses and their gaps."""
    found, whole = gaps_at_length(runs()), _whole()
    levels = {row: gap for row, gap in found.items() if row in CHART}
    furthest = max(levels, key=lambda level: abs(levels[level].percent))
    grown = [level for level, gap in levels.items() if gap.change > gap.change_half]
    growth = "no gap grew" if not grown else f"the gap of {' and of '.join(map(_shown, grown))} grew"
    widest = max(gap.half for gap in levels.values())
    takeaway = (
        f"After {whole[BASELINE]['tokens'] / 1e6:.0f} M tokens the losses of {len(levels)} levels lie at most "
        f"{abs(levels[furthest].percent):.2f} % from ``{BASELINE}``'s (``{furthest}``); the goal is {GOAL} %, and "
        f"the widest interval is ± {widest:.2f} %. Over the second half of the training {growth} by more than its "
        "interval."
    )
    rows = [(_shown(BASELINE), f"{whole[BASELINE]['loss']:.4f}", "", "")]
    for row, gap in found.items():
        apart = (f"{gap.percent:+.2f} ± {gap.half:.2f}", f"{gap.change:+.2f} ± {gap.change_half:.2f}")
        rows.append((_shown(row), f"{whole[row]['loss']:.4f}", *apart))
    header = ("Level", "loss", "gap, %", "growth, points")
    return block(takeaway, simple_table(header, rows), origin(read(_FILE)[0]))


def by_kind() -> str:
    """Accuracy of the next token by its kind at the baseline, and the differences of the levels and the twin."""
    whole = _whole()
    base = whole[BASELINE]["by_kind"]

    def apart(row: str, kind: str) -> float:
        return 100 * (whole[row]["by_kind"][kind]["accuracy"] - base[kind]["accuracy"])

    levels = [row for row in whole if row in CHART and row != BASELINE]
    twins = [row for row in whole if row == TWIN]
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
    base = whole[BASELINE]
    losses = [Line(BASELINE, tuple(base["train_loss"]), OTHERS, behind=True)]
    losses += [Line(_name(row), tuple(whole[row]["train_loss"]), colours[row]) for row in found if row in CHART]
    steps = [step for step in base["validations"] if int(step) >= STEPS // 10]
    apart = tuple(
        Line(_name(row), tuple(percent(whole[row]["validations"][s], base["validations"][s]) for s in steps), colour)
        for row, colour in colours.items()
    )
    furthest = max(abs(y) for line in apart for y in line.ys)
    limit = round(1.2 * max(furthest, half, GOAL), 2)
    xs = tuple(float(EVERY * (i + 1)) for i in range(len(base["train_loss"])))
    panels = (
        Panel("Training loss", "nats a token", xs, tuple(losses)),
        Panel(f"Gap of the validation loss to {BASELINE}, %", "", tuple(map(float, steps)), apart, limit, half),
    )
    see = (
        f"The training losses lie on each other; the gaps of the validation losses stay within {furthest:.2f} %. The "
        f"band is ± {half:.2f} %: a gap within it can be chance."
    )
    means = ", ".join(f"{gap.later:+.2f} % ({_shown(row)})" for row, gap in found.items())
    shown = (
        f"Lines: the mean loss of every {EVERY} steps, and gaps to ``{BASELINE}`` from a tenth of the training on. "
        f"Means of the gaps over the second half: {means}."
    )
    names = ", ".join(line.label for line in apart)
    alt = (
        f"Left: training losses over steps, on each other. Right: gaps of {names} to {BASELINE} in percent, within "
        f"{furthest:.2f}, and a band of {half:.2f} around zero."
    )
    return Picture("convergence_h200.png", see, shown, Lines("step", panels, alt))

"""Tables and a picture of the convergence at length, from convergence_h200.jsonl."""

from __future__ import annotations

import statistics
from typing import Any

from benchmarks.convergence_gaps import BASELINE, chance_of, gaps_at_length, percent, short_gaps
from benchmarks.convergence_run import EVERY, STEPS, Spec
from benchmarks.pictures import LINES, OTHERS, Line, Lines, Panel, Picture
from benchmarks.record import RESULTS, read
from benchmarks.rst import block, origin, simple_table
from nemo_lowprec.chart import CHART

__all__ = ["GOAL", "ablation", "by_kind", "curves_picture", "gaps", "runs", "short"]

GOAL = 0.3  # percent
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
    """The whole run of each level with seed 0."""
    return {
        spec.level: run for spec, run in runs().items() if spec.seed == 0 and spec.is_whole
    }  # fmt: skip


def gaps() -> str:
    """Final losses and their gaps."""
    found, whole = gaps_at_length(runs()), _whole()
    furthest = max(found.values(), key=lambda gap: abs(gap.percent))
    most = max(gap.change for gap in found.values())
    takeaway = (
        f"After {whole[BASELINE]['tokens'] / 1e6:.0f} M tokens the losses of {len(found)} levels lie at most "
        f"{abs(furthest.percent):.2f} % from ``{BASELINE}``'s (``{furthest.level}``); the goal is {GOAL} %. Over the "
        f"second half of the training no gap grew by more than {max(0.0, most):.2f} points."
    )
    rows = [(f"``{BASELINE}``", f"{whole[BASELINE]['loss']:.4f}", "", "")]
    for level, gap in found.items():
        rows.append((
            f"``{level}``", f"{whole[level]['loss']:.4f}", f"{gap.percent:+.2f} ± {gap.half:.2f}",
            f"{gap.change:+.2f} ± {gap.change_half:.2f}",
        ))  # fmt: skip
    header = ("Level", "final loss", "gap, %", "change of the gap over the second half, points")
    return block(takeaway, simple_table(header, rows), origin(read(_FILE)[0]))


def by_kind() -> str:
    """Accuracy of the next token by its kind."""
    whole = _whole()
    levels = [level for level in whole if level != BASELINE]
    base = whole[BASELINE]["by_kind"]
    most, at, of = max(
        (abs(whole[level]["by_kind"][kind]["accuracy"] - base[kind]["accuracy"]), level, kind)
        for level in levels
        for kind in base
    )
    takeaway = f"Accuracies differ by at most {100 * most:.2f} points from ``{BASELINE}``'s: {of} at ``{at}``."
    rows = [
        (
            kind, f"{figures['tokens']:,}", f"{100 * figures['accuracy']:.2f}",
            *(f"{100 * (whole[level]['by_kind'][kind]['accuracy'] - figures['accuracy']):+.2f}" for level in levels),
        )
        for kind, figures in base.items()
    ]  # fmt: skip
    header = ("Kind of token", "tokens", f"``{BASELINE}``, %", *(f"``{level}``" for level in levels))
    return block(takeaway, simple_table(header, rows))


def short() -> str:
    """Gaps of short runs, by seed: the chance that a single pair has."""
    found = short_gaps(runs())
    chance, freedom = chance_of(found)
    tokens = next(run["tokens"] for spec, run in runs().items() if spec.steps != STEPS)
    takeaway = (
        f"The gap of one pair of runs of {tokens / 1e6:.0f} M tokens varies by ± {chance:.2f} % (one standard "
        f"deviation, {freedom} degrees of freedom)."
    )
    rows = [
        (
            f"``{BASELINE}``, another first weight" if level == "twin" else f"``{level}``",
            f"{statistics.mean(by_seed.values()):+.2f}",
            ", ".join(f"{by_seed[seed]:+.2f}" for seed in sorted(by_seed)),
        )
        for level, by_seed in found.items()
    ]
    return block(takeaway, simple_table(("Level", "mean gap, %", "by seed"), rows))


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
                (f"``{BASELINE}``", f"{base:.4f}", ""),
                (f"``{spec.level}``", f"{usual:.4f}", f"{percent(usual, base):+.2f}"),
                (f"``{spec.level}``, coarse", f"{coarse:.4f}", f"{percent(coarse, base):+.2f}"),
            ],
        ),
    )


def curves_picture() -> Picture:
    """Training losses, and the gaps of validation losses with the band of chance."""
    found, whole = gaps_at_length(runs()), _whole()
    half = max(gap.half for gap in found.values())
    colours = dict(zip(found, LINES, strict=False))
    base = whole[BASELINE]
    losses = [Line(BASELINE, tuple(base["train_loss"]), OTHERS, behind=True)]
    losses += [Line(level, tuple(whole[level]["train_loss"]), colours[level]) for level in found]
    steps = [step for step in base["validations"] if int(step) >= STEPS // 10]
    apart = tuple(
        Line(level, tuple(percent(whole[level]["validations"][s], base["validations"][s]) for s in steps), colour)
        for level, colour in colours.items()
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
    shown = (
        f"Lines: the mean loss of every {EVERY} steps, and gaps of {len(found)} levels to ``{BASELINE}`` from a tenth "
        "of the training on."
    )
    alt = (
        f"Left: training losses over steps of {BASELINE} and {', '.join(found)}, on each other. Right: their gaps in "
        f"percent, within {furthest:.2f}, and a band of {half:.2f} around zero."
    )
    return Picture("convergence_h200.png", see, shown, Lines("step", panels, alt))

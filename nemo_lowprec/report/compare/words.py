"""A comparison in words, for the terminal and for the page."""

from __future__ import annotations

from nemo_lowprec.report.compare.comparison import Comparison, Outcome
from nemo_lowprec.report.page.words import OPERANDS, size

LEAST_FALL = 1.0  # dB of SQNR; a smaller fall is no reason to name a layer

HEADINGS = ("Level", "Seeds", "Loss", "Gap", "Leaves band", "Tokens/s", "Peak", "Bytes/param")


def cells(found: Outcome) -> list[str]:
    """The row of a level in the table, by ``HEADINGS``."""
    gap = "–" if found.gap is None else _signed(found.gap)
    gap += "" if found.gap_half is None else f"\n±{found.gap_half:.4f}"
    return [
        found.group.label,
        str(len(found.group.runs)),
        "not finite" if found.final is None else f"{found.final:.4f}",
        gap,
        "–" if found.leaves is None else f"{found.leaves:,}",
        "–" if found.tokens_per_second is None else f"{found.tokens_per_second:,.0f}",
        "–" if found.peak_bytes is None else size(found.peak_bytes),
        "–" if found.bytes_per_param is None else f"{found.bytes_per_param:.2f}",
    ]


def sentences(comparison: Comparison) -> list[tuple[str, str, str]]:
    """For each level but the reference: its label, a sentence about it, and ``good``, ``unclear`` or ``bad``."""
    reference = comparison.outcomes[0]
    found = []
    for outcome in comparison.outcomes[1:]:
        parts = [_loss(outcome), _band(outcome, comparison.band), _speed(outcome, reference)]
        found.append((outcome.group.label, " ".join(part for part in parts if part), _state(outcome)))
    return found


def _state(outcome: Outcome) -> str:
    """``bad`` where a level trains worse than the reference, ``unclear`` where the seeds cannot tell."""
    if outcome.gap is None or outcome.nonfinite_from is not None:
        return "bad"
    if outcome.gap_half is not None and outcome.gap > outcome.gap_half:
        return "bad"
    return "unclear" if outcome.leaves is not None and outcome.gap > 0 else "good"


def _loss(outcome: Outcome) -> str:
    if outcome.gap is None:
        return f"The loss is infinite or NaN from step {outcome.nonfinite_from:,} on."
    gap = _signed(outcome.gap)
    if outcome.gap_half is None:
        return f"The loss is {gap} beside the reference; one pair of runs gives no confidence interval."
    zero = "zero lies within" if abs(outcome.gap) <= outcome.gap_half else "zero lies outside"
    return f"The loss is {gap} ± {outcome.gap_half:.4f} beside the reference: {zero} the 95 % interval."


def _band(outcome: Outcome, band: bool) -> str:
    if not band:
        return "The reference has one seed, and so no band to leave."
    if outcome.leaves is None:
        return "The mean over the seeds stays in the band of the reference's seeds."
    fall = outcome.fall
    text = f"The mean over the seeds leaves the band of the reference's seeds at step {outcome.leaves:,}"
    if fall is None:
        return f"{text}."
    if fall.before - fall.after < LEAST_FALL:
        return f"{text}; there no layer's SQNR fell by {LEAST_FALL:g} dB or more."
    operand = OPERANDS.get(fall.operand, fall.operand)
    return (
        f"{text}; there the SQNR of {fall.layer} ({operand}) fell most, from {fall.before:.1f} to {fall.after:.1f} dB."
    )


def _speed(outcome: Outcome, reference: Outcome) -> str:
    if outcome.tokens_per_second is None or reference.tokens_per_second is None:
        return ""
    return f"A step is {outcome.tokens_per_second / reference.tokens_per_second:.2f} × as fast."


def _signed(number: float) -> str:
    return f"{number:+.4f}".replace("-", "−")

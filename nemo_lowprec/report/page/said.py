"""The words and tables of a run's page."""

from __future__ import annotations

from typing import Any

from nemo_lowprec.report.monitor.runs import Run
from nemo_lowprec.report.page.words import METRICS, OPERANDS, amount, count, duration, parameters, size
from nemo_lowprec.report.spoiled import Crossing, crossings

_FATES = {
    "left": "GEMMs run in half precision",
    "kept": "Left alone",
}


def told(run: Run) -> dict[str, Any]:
    """The words and tables of the page."""
    found, about = crossings(run), run.about
    return {
        "title": f"{about['level']}: report of a run",
        "run": run,
        "about": about,
        "summary": _summary(run),
        "spoiled": spoiled(found),
        "figures": _figures(run),
        "findings": run.audit["findings"] if run.audit else [],
        "traffic": _traffic(run.audit) if run.audit else None,
        "kept": _kept(about["layers"]),
        "first": _first(found),
    }


def spoiled(found: list[Crossing]) -> list[dict[str, str]]:
    """The layers beyond a bound, one entry each, the farthest first; ``said`` tells the metrics."""
    layers: dict[str, list[Crossing]] = {}
    for crossing in found:
        layers.setdefault(crossing.layer, []).append(crossing)
    return [
        {"layer": layer, "said": "; ".join(map(_crossing, of)), "step": f"{min(c.first_step for c in of):,}"}
        for layer, of in layers.items()
    ]


def _crossing(crossing: Crossing) -> str:
    operand = OPERANDS[crossing.operand]
    if crossing.metric == "nonfinite":
        return f"{crossing.value:,.0f} values of the {operand} are infinite or NaN"
    if crossing.metric == "amax_ratio":
        return f"amax of the {operand} {crossing.value:,.0f} × the median of all layers (bound {crossing.bound:,.0f} ×)"
    title, unit = METRICS[crossing.metric]
    return f"{title} of the {operand} {amount(crossing.value, unit)} (bound {amount(crossing.bound, unit)})"


def _summary(run: Run) -> str:
    about = run.about
    seconds = sum(rate[2] for rate in run.rates)
    parts = [f"{about['model']} of {parameters(about['parameters'])} parameters", count(run.last_step, "step")]
    parts += [f"{duration(seconds)} of training"] if seconds else []
    parts += [f"{count(about['processes'], 'process', 'es')} on {about['device']}"]
    times = len(run.attempts) - 1
    parts += [f"resumed {'once' if times == 1 else f'{times} times'}"] if times else []
    return ", ".join(parts) + ("." if run.ended else "; it has not ended in order: it still runs, or was cut short.")


def _figures(run: Run) -> list[tuple[str, str, str]]:
    """Key figures: a name, a value, a note."""
    figures = []
    if run.val_losses:
        step, loss = run.val_losses[-1]
        figures.append(("Validation loss", f"{loss:.4f}", f"at step {step:,}"))
    elif run.loss:
        last = sorted(run.loss)[-50:]
        figures.append(
            ("Training loss", f"{sum(run.loss[s] for s in last) / len(last):.4f}", f"last {len(last)} steps")
        )
    if run.tokens_per_second is not None:
        figures.append(("Tokens a second", f"{run.tokens_per_second:,.0f}", "median"))
    if run.peak_bytes:
        figures.append(("Peak memory", size(run.peak_bytes), "of the GPU"))
    skipped = run.samples[-1]["skipped_steps"]
    figures.append(
        ("Skipped steps", f"{skipped:,}", "a gradient was not finite" if skipped else "all steps were taken")
    )
    return figures


def _traffic(audit: dict[str, Any]) -> dict[str, Any] | None:
    """The audit's findings on the column Comm; None where nothing was sent."""
    found = [finding for finding in audit["findings"] if finding["column"] == "Comm"]
    return {"findings": found, "total": size(audit["total_bytes"]["Comm"])} if found else None


def _kept(fates: dict[str, Any]) -> list[dict[str, Any]]:
    """Reasons for half precision, each with its layers."""
    reasons: dict[tuple[str, str], list[str]] = {}
    for fate, title in _FATES.items():
        for layer, reason in fates.get(fate, {}).items():
            reasons.setdefault((title, reason), []).append(layer)
    return [{"fate": fate, "reason": reason, "layers": layers} for (fate, reason), layers in reasons.items()]


def _first(found: list[Crossing]) -> dict[str, str]:
    """The layer and the operand that the page shows first."""
    return {"layer": found[0].layer, "operand": found[0].operand} if found else {"layer": "", "operand": ""}

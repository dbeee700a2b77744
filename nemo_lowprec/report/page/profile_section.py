"""Where the time of a step goes: the section of a run's page."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from nemo_lowprec.report.page.charts import Chart, stacked_chart
from nemo_lowprec.report.profile.beside import Beside, beside
from nemo_lowprec.report.profile.step_profile import FILE, HALF_FILE, PARTS, StepProfile, read_profile
from nemo_lowprec.report.profile.table import OF_PARTS, layer_name, ratio, summary, verdict

_ROWS = 12


def profile_section(folder: Path) -> dict[str, Any] | None:
    """The words and the table of the section, and its chart as ``chart``; None without a profile in ``folder``."""
    if not (folder / FILE).exists():
        return None
    low = read_profile(folder / FILE)
    half = read_profile(folder / HALF_FILE) if (folder / HALF_FILE).exists() else None
    found = beside(half or low, low)
    kinds = sorted(found.kinds_of_layers(), key=lambda one: -one.at_level)
    rows = [
        {"layer": layer_name(one), "low": bool(one.low), "half": f"{one.half:,.0f}", "level": f"{one.at_level:,.0f}",
         "ratio": ratio(one.half, one.at_level)}
        for one in kinds[:_ROWS]
    ]  # fmt: skip
    profiles = {low.about["level"]: low} | ({} if half is None else {"BF16": half})
    parts = [part for part in PARTS if any(profile.parts()[part] for profile in profiles.values())]
    return {
        "summary": summary(found) if half else f"A step takes {low.ms:.2f} ms.",
        "verdict": verdict(found) if half else "",
        "state": _state(found),
        "level": low.about["level"],
        "beside": half is not None,
        "rows": rows,
        "parts": [OF_PARTS[part] for part in parts],
        "chart": _chart(profiles, parts),
    }


def _state(found: Beside) -> str:
    """``bad`` where layers are better left in BF16, ``unclear`` where the profiles cannot tell."""
    if not found.low.low or found.low.about["device"] == "CPU":
        return "unclear"
    return "bad" if found.better_in_half else "good"


def _chart(profiles: dict[str, StepProfile], parts: list[str]) -> Chart:
    bars = [
        (name, OF_PARTS[part], ms)
        for name, profile in profiles.items()
        for part, ms in profile.parts().items()
        if part in parts
    ]
    return stacked_chart(bars, [OF_PARTS[part] for part in parts], "ms")

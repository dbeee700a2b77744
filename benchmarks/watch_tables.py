"""Tables of what users see of their runs: the monitor's cost, profiles of a step, and ``advise`` beside real steps."""

from __future__ import annotations

from itertools import chain
from pathlib import Path
from typing import Any

from benchmarks.record import RESULTS, origins_of, read
from benchmarks.rst import block, failure, origin, simple_table

__all__ = ["advice", "lost", "monitor", "profiles", "watched"]

_EXTREMES = {"sqnr": 1, "underflow": 2, "saturation": 2}  # metrics and their digits
_RUNS = "bf16", "low"
_PARTS = {  # short, so that a table has 80 columns
    "gemm": "GEMM", "quantization": "quant.", "attention": "attn.", "elementwise": "elem.", "optimizer": "opt.",
    "communication": "comm.", "waits": "gaps",
}  # fmt: skip


def monitor(path: Path = RESULTS / "monitor_h200.jsonl") -> str:
    """What the monitor adds to a step, and to the peak of memory."""
    origins, figures = read(path)
    memory = {(f["model"], f["level"]): f["peak_mib"] for f in figures if f["benchmark"] == "monitor_memory"}
    found: dict[tuple[str, str], dict[int, dict[str, Any]]] = {}
    for f in figures:
        if f["benchmark"] == "monitor":
            found.setdefault((f["model"], f["level"]), {})[f["every"]] = f
    intervals = sorted({every for of in found.values() for every in of}, reverse=True)
    most = [max(of[every]["gpu_percent"] for of in found.values()) for every in intervals]
    costs = " and ".join(f"{cost:.1f} % at every {every}" for cost, every in zip(most, intervals, strict=True))
    takeaway = (
        f"The kernels of the monitor take up to {costs} steps of a training's time. The columns beside hold the "
        "difference of wall times, which has the noise of the host, the peak of memory in GiB, and how much more a "
        "watched training takes."
    )
    rows = []
    for (model, level), of in found.items():
        times = [(f"{of[e]['gpu_percent']:.2f}", f"{of[e]['overhead_percent']:.1f}") for e in intervals]
        plain, watched = (memory[model, level][name] / 1024 for name in ("plain", "watched"))
        rows.append((model, level, *chain.from_iterable(times), f"{plain:.1f}", f"{watched - plain:.1f}"))
    header = ("Model", "Level", *chain.from_iterable((f"% {every}", "wall") for every in intervals), "GiB", "more")
    return block(takeaway, simple_table(header, rows), origin(origins, "transformers", "timm"))


def watched(path: Path = RESULTS / "watched.jsonl") -> str:
    """The extreme numbers of operands over whole runs."""
    origins, figures = read(path)
    longest = _longest(figures)
    inputs, gradients = (min(f["operands"][kind]["sqnr"] for f in longest) for kind in ("input", "grad_output"))
    run = longest[0]
    model = f"a model of {run['parameters'] / 1e6:.0f} M parameters ({run['device']})"
    takeaway = (
        f"In {run['samples']} samples of {run['steps']:,} steps of {model} each layer's input had an SQNR of "
        f"{inputs:.1f} dB or more, and each output gradient one of {gradients:.1f} dB or more; E4M3's rounding alone "
        "gives 31.5 dB, and E5M2's 25.6 dB. In brackets is the step."
    )
    rows = []
    for f in figures:
        row = f"``{f['level']}``, {f['parameters'] / 1e6:.0f} M"
        for kind, of in f["operands"].items():
            numbers = (f"{of[metric]:.{digits}f} ({of[f'{metric}_step']:,})" for metric, digits in _EXTREMES.items())
            rows.append((row, kind.replace("grad_output", "gradient"), *numbers))
    header = ("Level, parameters", "operand", "least SQNR, dB", "most underflow, %", "saturation, %")
    return block(takeaway, simple_table(header, rows), origin(origins, done="Summed up"))


def _longest(figures: list[dict[str, Any]]) -> list[dict[str, Any]]:
    steps = max(f["steps"] for f in figures)
    return [f for f in figures if f["steps"] == steps]


def lost(path: Path = RESULTS / "watched.jsonl") -> str:
    """The share of a weight's elements that an update does not change, at five steps of the longest runs."""
    figures = read(path)[1]
    longest = _longest(figures)
    last = longest[0]["steps"]
    steps = [str(last * part // 30) for part in (1, 10, 20, 25, 30)]
    most = max(longest, key=lambda f: f["lost"][str(last)])
    takeaway = (
        f"At ``{most['level']}`` an update does not change {most['lost'][steps[0]]:.0f} % of the median weight's "
        f"elements early in the training, and {most['lost'][str(last)]:.0f} % in the last step, where the learning "
        "rate is a tenth of its maximum."
    )
    rows = [(f"``{f['level']}``", *(f"{f['lost'][step]:.1f}" for step in steps)) for f in longest]
    return block(takeaway, simple_table(("Lost updates, %, at step", *(f"{int(s):,}" for s in steps)), rows))


def profiles(path: Path = RESULTS / "profile_h100.jsonl") -> str:
    """ms of a step by part, in BF16 and at each level."""
    origins, figures = read(path)
    shown = {part: name for part, name in _PARTS.items() if any(f[of]["parts"][part] for f in figures for of in _RUNS)}
    rows, cases = [], set()
    for f in figures:
        case = f"{f['preset']}, {f['batch']} × {f['sequence']}"
        runs = {} if case in cases else {case: f["bf16"]}
        cases.add(case)
        for name, of in {**runs, f["level"]: f["low"]}.items():
            half = f["bf16"]["ms"]
            beside = ("", "") if name == case else (f"{half:.1f}", f"{half / of['ms']:.2f}")
            rows.append((name, f"{of['ms']:.1f}", *beside, *(f"{of['parts'][part]:.1f}" for part in shown)))
    gains = [f["bf16"]["ms"] / f["low"]["ms"] for f in figures]
    takeaway = (
        f"A step is {min(gains):.2f} × to {max(gains):.2f} × as fast as in BF16, and the parts say why. Of each model "
        "the first row is a run in BF16; beside each level stands the BF16 run that was measured with it."
    )
    header = ("Run", "ms", "BF16", "×", *shown.values())
    return block(takeaway, simple_table(header, rows), origin(origins, "transformers"))


def advice(path: Path = RESULTS / "advise_h200.jsonl", case: str = "llama_8b") -> str:
    """Bytes and time that ``advise`` expects of a case, beside those of real steps."""
    levels = [f for f in read(path)[1] if f["benchmark"] == "advise_level" and f["case"] == case]
    origins = origins_of(path, lambda f: f in levels)
    rows: list[tuple[str, ...]] = []
    for f in levels:
        real = _ratios(f, "peak_gib", "bytes_of_real", 1), _ratios(f, "ms", "time_of_real", 0)
        expected = f"{f['expected_gib']:.1f}", "–" if f["expected_ms"] is None else f"{f['expected_ms']:.0f}"
        rows.append((f["level"], expected[0], *real[0], expected[1], *real[1]))
    by = {key: [abs(100 * (f[key] - 1)) for f in levels if key in f] for key in ("bytes_of_real", "time_of_real")}
    shape = f"{case}, {levels[0]['batch']} × {levels[0]['sequence']}"
    takeaway = (
        f"Of {shape}, ``advise`` was at most {max(by['bytes_of_real']):.1f} % off in bytes and "
        f"{max(by['time_of_real']):.0f} % off in time. A real step and the ratio of both figures stand beside each "
        "expected figure."
    )
    header = ("Level", "GiB", "real", "ratio", "ms", "real", "ratio")
    return block(takeaway, simple_table(header, rows), origin(origins, "transformers"))


def _ratios(figure: dict[str, Any], of: str, ratio: str, digits: int) -> tuple[str, str]:
    if ratio not in figure:
        return failure(figure) if "error" in figure else "–", ""
    return f"{figure[of]:.{digits}f}", f"{figure[ratio]:.3f}"

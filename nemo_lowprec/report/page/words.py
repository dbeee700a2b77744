"""Numbers in words for pages and tables: bytes, durations, counts, names of metrics and operands."""

from __future__ import annotations

import re

METRICS = {
    "sqnr": ("SQNR", "dB"),
    "underflow": ("Underflow", "%"),
    "saturation": ("Saturation", "%"),
    "amax": ("amax", ""),
    "scale": ("Scale", ""),
    "binades": ("Dynamic range", "binades"),
    "nonfinite": ("Infinite or NaN", "values"),
}
PARAM_METRICS = {
    "lost": ("Lost updates", "%"),
    "weight_sqnr": ("SQNR of the weight", "dB"),
    "gradient_sqnr": ("SQNR of the gradient", "dB"),
    "first_sqnr": ("SQNR of the first moment", "dB"),
    "second_sqnr": ("SQNR of the second moment", "dB"),
}
OPERANDS = {"input": "input", "weight": "weight", "grad_output": "output gradient"}


def size(bytes_: float) -> str:
    """Bytes in the largest binary unit of which there is at least one."""
    for unit, factor in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if bytes_ >= factor:
            return f"{bytes_ / factor:,.1f} {unit}"
    return f"{bytes_:,.0f} B"


def folded(name: str, letters: int) -> list[str]:
    """A name in lines of at most ``letters``, cut behind underscores and spaces; a longer word is one line."""
    lines = [""]
    for part in re.findall(r"[^_ ]+[_ ]?|[_ ]", name):
        if lines[-1] and len(lines[-1]) + len(part) > letters:
            lines.append("")
        lines[-1] += part
    return lines


def duration(seconds: float) -> str:
    """Seconds as ``2 h 5 min``, ``6 min 12 s`` or ``3.1 s``."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes_left = divmod(minutes, 60)
    return f"{hours} h {minutes_left} min" if hours else f"{minutes} min {rest} s"


def count(number: int, noun: str, ending: str = "s") -> str:
    """``1 layer``, ``2,000 layers``."""
    return f"{number:,} {noun}" + (ending if number != 1 else "")


def amount(value: float, unit: str) -> str:
    """A number of three significant digits with its unit."""
    text = f"{value:,.3g}" if abs(value) < 1000 else f"{value:,.0f}"
    return f"{text} {unit}".rstrip()


def parameters(number: int) -> str:
    """``101 M`` or ``8.03 B`` for a number of parameters."""
    for unit, factor in (("B", 10**9), ("M", 10**6), ("k", 10**3)):
        if number >= factor:
            return f"{number / factor:.3g} {unit}"
    return str(number)

"""Profiles as tables and sentences, in 80 columns."""

from __future__ import annotations

import re

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from nemo_lowprec.lines import WIDTH, text_lines
from nemo_lowprec.report.advice.paste import patterns_of, python_line, with_skip
from nemo_lowprec.report.profile.beside import Beside, LayerTimes
from nemo_lowprec.report.profile.step_profile import PARTS
from nemo_lowprec.report.profile.timeline import WAITS

__all__ = ["OF_PARTS", "layer_name", "print_profiles", "ratio", "summary", "verdict"]

OF_PARTS = {
    "gemm": "GEMM", "quantization": "Quantization", "attention": "Attention", "elementwise": "Elementwise",
    "optimizer": "Optimizer", "communication": "Communication", WAITS: "Host gaps",
}  # fmt: skip
_ROWS = 10  # of the table of layers
_NO_LAYER = "(no layer)"


def summary(found: Beside) -> str:
    """How long a step takes in both runs, and where most of the difference lies."""
    half, low, name = found.half.ms, found.low.ms, found.low.about["level"]
    text = f"A step takes {low:.2f} ms at {name} and {half:.2f} ms in BF16: {half / low:.2f} × as fast."
    parts = {part: found.low.parts()[part] - found.half.parts()[part] for part in PARTS}
    most = max(parts, key=lambda part: -parts[part] if low < half else parts[part])
    if parts[most] * (low - half) > 0:
        word = "less" if low < half else "more"
        text += f" The largest part of the difference: {_in_text(most)}, {abs(parts[most]):.2f} ms {word}."
    return text


def _in_text(part: str) -> str:
    return "GEMMs" if part == "gemm" else OF_PARTS[part].lower()


def verdict(found: Beside) -> str:
    """The layers that are better left in BF16, and how."""
    slower = found.better_in_half
    if not found.low.low:
        return f"No layer computes its GEMMs in FP8 at {found.low.about['level']}."
    if found.low.about["device"] == "CPU":
        return "On a CPU FP8 is emulated: only a profile on a GPU tells which layers are better left in BF16."
    if not slower:
        return "No layer is faster in BF16."
    lost = sum(one.at_level - one.half for one in slower)
    names = [name for one in slower for name in one.low]
    are = "layer is" if len(names) == 1 else "layers are"
    arguments = found.low.about["arguments"]
    line = python_line(found.low.about["level"], with_skip(arguments, patterns_of(names, found.low.linears)))
    return f"{len(names)} {are} faster in BF16, by {lost:,.0f} µs of a step. Leave them there: {line}"


def print_profiles(found: Beside) -> None:
    """Print the time of each part, and of each kind of layer."""
    console = Console(width=WIDTH)
    print("\n".join(text_lines(summary(found))))
    console.print(_parts(found))
    console.print(_layers(found))
    print("\n".join(text_lines(verdict(found))))
    if min(found.half.matched, found.low.matched) < 0.95:
        shares = f"{found.low.matched:.0%} of the GPU's time at the level, and {found.half.matched:.0%} in BF16"
        print("\n".join(text_lines(f"Layers are known for {shares}; the rest is in {_NO_LAYER}.")))


def _parts(found: Beside) -> Table:
    table = _table("ms of a step")
    half, low = found.half.parts(), found.low.parts()
    for part in PARTS:
        if half[part] >= 0.0005 or low[part] >= 0.0005:
            table.add_row(OF_PARTS[part], f"{half[part]:.3f}", f"{low[part]:.3f}", ratio(half[part], low[part]))
    table.add_section()
    table.add_row("Step", f"{found.half.ms:.3f}", f"{found.low.ms:.3f}", ratio(found.half.ms, found.low.ms))
    return table


def _layers(found: Beside) -> Table:
    table = _table("µs of a step, by layer (*: in FP8)")
    kinds = found.kinds_of_layers()
    for one in kinds[:_ROWS]:
        table.add_row(*_row(one))
    rest = kinds[_ROWS:]
    if rest:
        half, low = sum(one.half for one in rest), sum(one.at_level for one in rest)
        table.add_row(f"{len(rest)} more", f"{half:,.0f}", f"{low:,.0f}", ratio(half, low))
    return table


def _row(one: LayerTimes) -> tuple[str, ...]:
    marked = f"{layer_name(one)}{' *' if one.low else ''}"
    return marked, f"{one.half:,.0f}", f"{one.at_level:,.0f}", ratio(one.half, one.at_level)


def layer_name(one: LayerTimes) -> str:
    """The name of a row: without the modules that hold the blocks."""
    return re.sub(r"^.*?(?=[^.]+\.\*)", "", one.name) or _NO_LAYER


def _table(title: str) -> Table:
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column(title, overflow="fold")
    for heading in ("BF16", "level", "BF16 /\nlevel"):
        table.add_column(heading, justify="right", no_wrap=True)
    return table


def ratio(half: float, low: float) -> str:
    """BF16's time over the level's; a dash where one of the runs takes none."""
    return "–" if not half or not low else f"{half / low:.2f}"

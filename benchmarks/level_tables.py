"""The tables of docs/levels/: the row, the arguments and the figures of each level."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from functools import partial
from statistics import geometric_mean
from typing import Any

from benchmarks import everyday_tables, expert_tables, lora_tables
from benchmarks.everyday_contestants import OURS
from benchmarks.llama import BATCH, SEQUENCE
from benchmarks.loss_parity import BASELINE
from benchmarks.loss_tables import losses, trained
from benchmarks.memory import LIGHTNING
from benchmarks.memory_tables import on_one_gpu, saved, vision
from benchmarks.parallel_tables import on_all_gpus
from benchmarks.record import RESULTS, read
from benchmarks.rst import block, failure, rst_table, times
from benchmarks.step_tables import steps
from nemo_lowprec.chart import CHART, COLUMNS
from nemo_lowprec.chart.options import option_defaults
from nemo_lowprec.plugins import LEVELS

__all__ = ["LEVEL_TABLES", "arguments", "figures", "levels", "row"]

_Row = tuple[str, str, str, str]
_MIXED = "lightning bf16-mixed"
_ENTRY = re.compile(r"^ {4}(\w+): (.*(?:\n {8}.*)*)", re.MULTILINE)


def levels() -> str:
    """All levels with their pages."""
    rows = [(f"`{name} <{name}.rst>`__", f"{level.summary}.") for name, level in CHART.items()]
    return block(f"The chart has {len(CHART)} levels, each with a page.", rst_table(("Level", "In short"), rows))


def row(level: str) -> str:
    """The row of the chart, one column a line, and the formats of everything else."""
    found = CHART[level]
    cells = [(title, cell) for title, cell in found.columns().items() if title != COLUMNS[0]]
    rest = found.rest.upper()
    cells.append(("Embeddings, the head, other matrices", rest))
    cells.append(("Norms, biases, other vectors", (found.vectors or found.rest).upper()))
    cells.append(("What no GEMM of the level computes", found.autocast.upper()))
    cells.append(("Scaling of GEMM operands", found.scaling or "–"))
    cells.append(("Loss scaling", "dynamic" if found.has_loss_scale else 'with ``half="fp16"``' if found.half else "–"))
    number = list(CHART).index(level) + 1
    return block(f"Row {number} of the chart's {len(CHART)}: {found.summary}.", rst_table(("Column", "Format"), cells))


def arguments(level: str) -> str:
    """The arguments with their defaults, as the docstring of the level's function explains them."""
    texts = {name: " ".join(text.split()) for name, text in _ENTRY.findall(inspect.getdoc(LEVELS[level]) or "")}
    defaults = option_defaults(CHART[level])
    rows = [(f"``{name}={value!r}``", _sentence(texts[name])) for name, value in defaults.items()]
    number = f"{len(rows)} arguments, all of them optional" if len(rows) > 1 else "1 argument, which is optional"
    return block(f"``{level}`` takes {number}.", rst_table(("Argument, default", "Meaning"), rows))


def _sentence(text: str) -> str:
    return text[0].upper() + text[1:]


def _ms(figure: dict[str, Any]) -> str:
    return f"{figure['ms']:.1f} ms, {figure['peak_gib']:.1f} GiB"


def _steps(level: str) -> dict[str, dict[str, Any]]:
    """Whole steps on one GPU, by the options of the contestant (empty without)."""
    rowwise = {f["name"]: f for f in read(RESULTS / "rowwise_h200.jsonl")[1]}
    named = re.compile(rf"nemo_lowprec {level}(?:, (.*))?")
    return {m[1] or "": f for name, f in (steps() | rowwise).items() if (m := named.fullmatch(name))}


def _step(level: str) -> Iterator[_Row]:
    found, base = _steps(level), steps()[f"nemo_lowprec {BASELINE}"]
    if level == BASELINE:
        mixed = steps()[_MIXED]
        yield "Whole step, 1 GPU", _ms(base), f"Lightning's ``bf16-mixed``: {_ms(mixed)}", times(base, mixed)
        return
    plain = found[""]
    run = f"``{BASELINE}``" if f"nemo_lowprec {level}" in steps() else f"``{BASELINE}``, in another run"
    yield "Whole step, 1 GPU", _ms(plain), f"{run}: {_ms(base)}", times(plain, base)
    for options, figure in found.items():
        if options:
            yield f"Whole step, 1 GPU, {options}", _ms(figure), f"without: {_ms(plain)}", times(figure, plain)


def _several(level: str) -> Iterator[_Row]:
    found = on_all_gpus()
    for strategy in ("lowprec_ddp", "lowprec_sharded"):
        figure, base = found.get(f"{level}, {strategy}"), found[f"{BASELINE}, {strategy}"]
        if figure is not None and level != BASELINE:
            of = f"Whole step, {figure['gpus']} GPUs, ``{strategy}``"
            yield of, f"{_ms(figure)} a GPU", f"``{BASELINE}``: {_ms(base)} a GPU", times(figure, base)


def _models(level: str) -> Iterator[_Row]:
    found = everyday_tables.figures()
    gains = [of[OURS + level]["x"] for of in found.values() if "x" in of.get(OURS + level, {})]
    if gains:
        name = f"Whole steps of {len(gains)} models in a plain loop, geometric mean"
        yield (
            name,
            f"{min(gains):.2f} × to {max(gains):.2f} ×",
            "BF16 autocast, eager",
            f"{geometric_mean(gains):.2f} ×",
        )


def _loss(level: str) -> Iterator[_Row]:
    found = losses()
    base = found[BASELINE]
    for name, f in found.items():
        own, _, options = name.partition("+")
        if own == level and level != BASELINE:
            of = f"Validation loss, {f['seeds']} seeds" + (f", {options.replace('_', ' ')}" if options else "")
            gap = f"{f['gap_percent_mean']:+.2f} %"
            yield of, f"{f['val_loss_mean']:.3f}", f"``{BASELINE}``: {base['val_loss_mean']:.3f}", gap


def _accuracy(level: str) -> Iterator[_Row]:
    figures = read(RESULTS / "image_parity_h200.jsonl")[1]
    found = {f["level"]: f["accuracy_mean"] * 100 for f in figures if f["benchmark"] == "image_parity_summary"}
    if level in found and level != BASELINE:
        gap = f"{found[level] - found[BASELINE]:+.2f} points"
        yield "Accuracy on images", f"{found[level]:.2f} %", f"``{BASELINE}``: {found[BASELINE]:.2f} %", gap


def _memory(level: str) -> Iterator[_Row]:
    for model, of in vision().items():
        if level in of:
            ours, amp = of[level], of[LIGHTNING]
            cells = [f"{f['peak_allocated_mb']:,} MB, {f['ms']:.0f} ms" for f in (ours, amp)]
            name = f"Peak memory, timm's {model}, batch {ours['batch']}"
            yield name, cells[0], f"Lightning's ``{LIGHTNING}``: {cells[1]}", f"{saved(of, level):.1f} % saved"


def _whole(level: str) -> Iterator[_Row]:
    found = on_one_gpu()
    base = found[BASELINE]
    if level in found and level != BASELINE:
        ours = found[level]
        name = f"Llama-3-8B trained on 1 GPU, 1 × {ours['sequence']}, recomputed"
        said = f"{ours['tokens_per_s']:,} tokens/s, {ours['peak_gib']:.1f} GiB"
        yield name, said, f"``{BASELINE}``: {failure(base)}", "–"


def _fine_tuning(level: str) -> Iterator[_Row]:
    for (batch, recomputes), f in lora_tables.figures(OURS + level).items():
        beside = lora_tables.figures(lora_tables.BF16)[batch, recomputes]
        name = f"LoRA of Llama-3-8B, {batch} × {f['sequence']}{', recomputed' if recomputes else ''}"
        yield name, _ms(f), f"BF16 autocast: {_ms(beside)}", f"{f['x']:.2f} ×"


def _experts(level: str) -> Iterator[_Row]:
    for model, of in expert_tables.figures().items():
        if f := of.get(OURS + level):
            ours, beside = (f"{c['ms']:.1f} ms, {c['peak_mib'] / 1024:.1f} GiB" for c in (f, of[expert_tables.BF16]))
            yield f"Mixture of experts, {model}", ours, f"BF16 weights and states: {beside}", f"{f['x']:.2f} ×"


_PARTS: tuple[Callable[[str], Iterator[_Row]], ...] = (
    _step, _several, _models, _loss, _accuracy, _memory, _whole, _fine_tuning, _experts,
)  # fmt: skip


def figures(level: str) -> str:
    """Everything that was measured at the level, beside another one."""
    rows = [row for part in _PARTS for row in part(level)]
    step = _steps(level)[""]
    beside = steps()[_MIXED if level == BASELINE else f"nemo_lowprec {BASELINE}"]
    named = "Lightning's ``bf16-mixed``" if level == BASELINE else f"``{BASELINE}``"
    said = (
        f"A step of a Llama-8B-shaped model (batch {BATCH} × {SEQUENCE}) takes {step['ms']:.1f} ms within "
        f"{step['peak_gib']:.1f} GiB on one H200, {times(step, beside)} as fast as {named}"
    )
    if level in losses() and level != BASELINE:
        size, gap = trained()["parameters"] / 1e6, losses()[level]["gap_percent_mean"]
        said += (
            f"; the validation loss of a Llama of {size:.0f} M parameters lies {gap:+.2f} % from that at ``{BASELINE}``"
        )
    return block(f"{said}.", rst_table(("Measured", "Here", "Beside it", "Ratio"), rows))


_MEASURED = [name for name in CHART if _steps(name)]
LEVEL_TABLES: dict[str, Callable[[], str]] = {
    "levels": levels,
    **{f"row_{name}": partial(row, name) for name in CHART},
    **{f"arguments_{name}": partial(arguments, name) for name in CHART},
    **{f"figures_{name}": partial(figures, name) for name in _MEASURED},
}

"""The table of docs/which_level.rst: for a GPU, a model and an aim the level whose figures are best."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from statistics import geometric_mean
from typing import Any

from benchmarks import everyday_tables, expert_tables, lora_tables
from benchmarks.everyday_contestants import LEVELS, OURS
from benchmarks.llama import BATCH, SEQUENCE
from benchmarks.loss_parity import BASELINE
from benchmarks.loss_tables import losses, trained
from benchmarks.memory import LIGHTNING
from benchmarks.memory_tables import saved, vision
from benchmarks.parallel_tables import on_all_gpus
from benchmarks.record import RESULTS, read
from benchmarks.rst import block, rst_table
from benchmarks.step_tables import steps
from nemo_lowprec.chart import CHART
from nemo_lowprec.report import GIB, memory_of

__all__ = ["which_level"]

_Row = tuple[str, str, str, str, str]
_H100, _H200 = "H100, 80 GB", "H200, 141 GB"
_GIB = {_H100: memory_of("H100") / GIB, _H200: memory_of("H200") / GIB}


def _page(level: str) -> str:
    return f"`{level} <levels/{level}.rst>`__"


def _has_masters(level: str) -> bool:
    return "fp32" in (CHART[level].master_weight, CHART[level].weight)


_EQUAL = 1.03  # times the least time: closer ones differ between runs


def _best(found: dict[str, dict[str, Any]], key: str, of: Callable[[str], bool] = lambda level: True) -> str:
    """The level with the smallest figure; of times that are as good as equal, that with the smallest peak."""
    best = min((level for level in found if of(level)), key=lambda level: found[level][key])
    if key != "ms":
        return best
    peak = next(name for name in ("peak_gib", "peak_mib") if name in found[best])
    equal = [level for level in found if of(level) and found[level]["ms"] <= _EQUAL * found[best]["ms"]]
    return min(equal, key=lambda level: found[level][peak])


def _on_one_gpu() -> Iterable[_Row]:
    """Whole steps of the Llama-8B-shaped model."""
    found = {level: f for level in CHART if (f := steps().get(f"nemo_lowprec {level}"))}
    base = found[BASELINE]
    model = f"2 B, Llama-8B-shaped, {BATCH} × {SEQUENCE}"
    for aim, of in (("fastest step", lambda level: True), ("fastest step with FP32 masters", _has_masters)):
        level = _best(found, "ms", of)
        f = found[level]
        smallest = f["peak_gib"] == min(other["peak_gib"] for other in found.values())
        ours, other = (f"{g['ms']:.0f} ms, {g['peak_gib']:.1f} GiB" for g in (f, base))
        yield _H200, model, f"{aim}{', least memory' * smallest}", _page(level), f"{ours}; ``{BASELINE}``: {other}"


def _everyday() -> Iterable[_Row]:
    found = everyday_tables.figures().values()
    gains = {level: [of[OURS + level]["x"] for of in found if "x" in of.get(OURS + level, {})] for level in LEVELS}
    for level in sorted(gains, key=lambda level: -geometric_mean(gains[level])):
        x = gains[level]
        aim = "fastest step" if not _has_masters(level) else "fastest step with FP32 masters"
        said = f"{geometric_mean(x):.2f} × as fast as BF16 autocast ({min(x):.2f} to {max(x):.2f})"
        yield _H200, f"0.1 to 2 B, {len(x)} models of timm and transformers", aim, _page(level), said


def _whole_llama() -> Iterable[_Row]:
    """All of Llama-3-8B, on both GPUs."""
    for gpu, file in ((_H100, "advise_h100.jsonl"), (_H200, "advise_h200.jsonl")):
        figures = [f for f in read(RESULTS / file)[1] if f["benchmark"] == "advise_level" and f["case"] == "llama_8b"]
        found = {f["level"]: f for f in figures if "ms" in f}
        sequence = figures[0]["sequence"]
        level = _best(found, "ms")
        smallest = found[level]["peak_gib"] == min(f["peak_gib"] for f in found.values())
        others = [f"``{f['level']}``" for f in figures if f["expected_gib"] > _GIB[gpu]]
        said = f"{found[level]['ms']:.0f} ms, {found[level]['peak_gib']:.1f} GiB"
        said += f"; no room for {', '.join(others)}" if others else ""
        model = f"8 B, all trained, 1 × {sequence}, layers recomputed"
        yield gpu, model, f"fastest that fits{', least memory' * smallest}", _page(level), said


def _vision() -> Iterable[_Row]:
    for model, of in vision().items():
        found = {level: f for level, f in of.items() if level in CHART}
        level = _best(found, "peak_allocated_mb")
        ours, amp = found[level], of[LIGHTNING]
        times = ours["ms"] / amp["ms"]
        said = f"{saved(of, level):.1f} % less than Lightning's ``{LIGHTNING}``, at {times:.2f} × its time"
        parameters = f"{ours['parameters'] / 1e9:.1f} B"
        yield _H200, f"{parameters}, timm's {model}, batch {ours['batch']}", "least memory", _page(level), said


def _adapters() -> Iterable[_Row]:
    key = lora_tables.largest()[0]["batch"], False
    found = {level: lora_tables.figures(OURS + level)[key] for level in LEVELS}
    level = _best(found, "ms")
    f, beside = found[level], lora_tables.figures(lora_tables.BF16)[key]
    said = f"{f['x']:.2f} × as fast as BF16, {f['peak_gib']:.1f} GiB beside {beside['peak_gib']:.1f}"
    yield _H200, f"8 B, LoRA, {f['batch']} × {f['sequence']}", "fastest step", _page(level), said


def _mixtures() -> Iterable[_Row]:
    for model, of in expert_tables.figures().items():
        found = {level: of[OURS + level] for level in LEVELS if "ms" in of.get(OURS + level, {})}
        level = _best(found, "ms")
        f, beside = found[level], of[expert_tables.BF16]
        ours, other = (g["peak_mib"] / 1024 for g in (f, beside))
        said = f"{f['x']:.2f} × as fast as with BF16 weights and states, {ours:.1f} GiB beside {other:.1f}"
        yield _H200, f"{f['parameters'] / 1e9:.1f} B, {model}", "fastest step", _page(level), said


def _several() -> Iterable[_Row]:
    figures = on_all_gpus()
    gpus = figures[f"{BASELINE}, lowprec_ddp"]["gpus"]
    for strategy, aim, key in (("lowprec_ddp", "fastest step", "ms"), ("lowprec_sharded", "least memory", "peak_gib")):
        found = {level: f for level in CHART if (f := figures.get(f"{level}, {strategy}"))}
        level, base = _best(found, key), found[BASELINE]
        f = found[level]
        said = (
            f"``{strategy}``: {f['ms']:.0f} ms, {f['peak_gib']:.1f} GiB a GPU; ``{BASELINE}``: {base['ms']:.0f} ms, "
            f"{base['peak_gib']:.1f} GiB"
        )
        yield f"{gpus} × {_H200}", f"2 B, Llama-8B-shaped, {BATCH} × {SEQUENCE} a GPU", aim, _page(level), said


def _losses() -> Iterable[_Row]:
    found = {level: {"gap": abs(f["gap_percent_mean"])} for level, f in losses().items() if level in CHART}
    level = _best(found, "gap", lambda level: CHART[level].has_fp8)
    gap, spread = losses()[level]["gap_percent_mean"], losses()[BASELINE]["seed_spread_percent"]
    said = f"{gap:+.2f} % in validation loss; ``{BASELINE}``'s own seeds lie {spread:.2f} % apart"
    model = f"{trained()['parameters'] / 1e9:.1f} B, Llama, {trained()['steps']:,} steps"
    yield _H200, model, f"FP8 loss nearest to ``{BASELINE}``", _page(level), said


def which_level() -> str:
    """One row for a GPU, a model and an aim."""
    parts = (_everyday, _on_one_gpu, _whole_llama, _vision, _adapters, _mixtures, _several, _losses)
    rows = [row for part in parts for row in part()]
    taken = sorted({row[3] for row in rows}, key=lambda page: -sum(row[3] == page for row in rows))
    first = taken[0].split()[0].strip("`")
    said = f"``{first}`` is the best of {sum(row[3] == taken[0] for row in rows)} of these {len(rows)} rows."
    cells = [(f"{gpu}: {model}", *others) for gpu, model, *others in rows]
    return block(said, rst_table(("GPU: parameters, model, batch", "Aim", "Level", "Measured"), cells))

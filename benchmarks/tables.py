"""The README's tables of measurements, made from benchmarks/results/: ``python -m benchmarks.tables`` prints them.

``python -m benchmarks.tables --write`` puts them into README.rst, between the comments that name them, and draws the
picture of throughput.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.record import read
from nemo_lowprec.chart import CHART, COLUMNS

RESULTS = Path(__file__).parent / "results"
README = Path(__file__).parent.parent / "README.rst"
_BLACKWELL = ("mxfp8", "nvfp4")


def rst_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A reStructuredText list-table."""
    lines = [".. list-table::", "   :header-rows: 1", ""]
    for row in (header, *rows):
        lines += [f"   {'*' if i == 0 else ' '} - {cell}" for i, cell in enumerate(row)]
    return "\n".join(lines)


def chart() -> str:
    """The precision chart, without the rows that no run has shown."""
    rows = [level for level in CHART.values() if level.scaling not in _BLACKWELL]
    return rst_table(COLUMNS, [[f"``{r.name}``", *list(r.columns().values())[1:]] for r in rows])


def throughput() -> str:
    """Whole training steps, from train_step_h200.jsonl."""
    origins, figures = read(RESULTS / "train_step_h200.jsonl")
    rows = sorted((f for f in figures if "tokens_per_s" in f), key=lambda f: -f["tokens_per_s"])
    table = rst_table(
        ("Contestant", "tokens/s", "ms a step", "peak GiB"),
        [(f["name"], f"{f['tokens_per_s']:,}", f"{f['ms']:.1f}", f"{f['peak_gib']:.1f}") for f in rows],
    )
    return f"{_origin(origins)}\n\n{table}"


def parity() -> str:
    """Validation loss beside bf16_mixed, from loss_parity_h200.jsonl."""
    origins, figures = read(RESULTS / "loss_parity_h200.jsonl")
    rows = [f for f in figures if f["benchmark"] == "loss_parity_summary"]
    table = rst_table(
        ("Level", "seeds", "validation loss", "gap to bf16_mixed, %: mean (by seed)", "spread of its seeds, %"),
        [
            (
                f"``{f['level']}``",
                str(f["seeds"]),
                f"{f['val_loss_mean']:.4f}",
                f"{f['gap_percent_mean']:+.2f} ({', '.join(f'{gap:+.2f}' for gap in f['gap_percent'])})",
                f"{f['seed_spread_percent']:.2f}",
            )
            for f in rows
        ],
    )
    return f"{_origin(origins)}\n\n{table}"


def backends() -> str:
    """Errors of the backends' GEMMs, from backends_h200.jsonl."""
    origins, figures = read(RESULTS / "backends_h200.jsonl")
    cells: dict[tuple[str, str], dict[str, dict]] = {}
    for f in figures:
        if "to_float64" in f:
            cells.setdefault((f["scaling"], f["backend"]), {})[f["gemm"]] = f
    times = {(f.get("scaling"), f["backend"]): f"{f['ms']:.2f}" for f in figures if f["benchmark"] == "backends_time"}
    rows: list[tuple[str, ...]] = [("none: BF16", "torch", "–", "–", "–", times[None, "bf16"])]
    for (scaling, backend), gemms in cells.items():
        errors = (f"{100 * g['to_float64']:.2f} ({100 * g['to_reference']:.3f})" for g in gemms.values())
        rows.append((scaling, backend, *errors, times.get((scaling, backend), "–")))
    table = rst_table(("Scaling", "Backend", "fprop", "dgrad", "wgrad", "ms at Llama-8B's MLP"), rows)
    return f"{_origin(origins)}\n\n{table}"


def throughput_picture(path: Path) -> None:
    """Tokens/s by contestant: ours, and the others."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    origins, figures = read(RESULTS / "train_step_h200.jsonl")
    rows = sorted((f for f in figures if "tokens_per_s" in f), key=lambda f: f["tokens_per_s"])
    figure, axes = plt.subplots(figsize=(11, 0.34 * len(rows) + 1.2))
    colors = ["#76b900" if f["name"].startswith("nemo_lowprec") else "#8899aa" for f in rows]
    bars = axes.barh(
        [f["name"].removeprefix("nemo_lowprec ") for f in rows], [f["tokens_per_s"] for f in rows], color=colors
    )
    axes.bar_label(bars, [f"{f['tokens_per_s']:,}  ({f['peak_gib']:.0f} GiB)" for f in rows], padding=3, fontsize=8)
    axes.set(
        xlabel=f"tokens/s of whole training steps, Llama-8B-shaped, {origins[0]['gpu']}", title="green: this project"
    )
    axes.margins(x=0.18)
    axes.tick_params(axis="y", labelsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def _origin(origins: list[dict]) -> str:
    def one(origin: dict) -> str:
        versions = origin["versions"]
        named = ", ".join(f"{n} {versions[n]}" for n in ("torch", "transformer-engine", "lightning") if versions.get(n))
        gpu = f"{origin['gpus']} × {origin['gpu']}" if origin["gpus"] > 1 else origin["gpu"]
        return f"``{origin['command']}`` on {gpu}, {origin['date']}, {named}"

    return ";\n".join(map(one, origins)) + ":"


TABLES: dict[str, Callable[[], str]] = {
    "chart": chart,
    "throughput": throughput,
    "parity": parity,
    "backends": backends,
}


def fill(text: str) -> str:
    """``text`` with every block ``.. NAME begins`` to ``.. NAME ends`` made anew."""
    for name, make in TABLES.items():
        block = rf"(?s)(\.\. {name} begins\n\n).*?(\n\n\.\. {name} ends)"
        text = re.sub(block, lambda m, make=make: m[1] + make() + m[2], text)  # type: ignore[misc]
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--write", action="store_true", help="put the tables into README.rst")
    if parser.parse_args().write:
        README.write_text(fill(README.read_text()))
        throughput_picture(RESULTS / "train_step_h200.png")
        return
    for make in TABLES.values():
        print(make(), end="\n\n")


if __name__ == "__main__":
    main()

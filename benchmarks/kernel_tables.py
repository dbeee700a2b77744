"""Tables of the parts of a step: the optimizer's step, GEMMs, quantization of their operands, patch embeddings."""

from __future__ import annotations

from typing import Any

from benchmarks.record import RESULTS, read
from benchmarks.rst import block, milliseconds, origin, simple_table, times
from nemo_lowprec.chart import CHART

__all__ = ["OPTIMIZERS", "backends", "casts", "host", "optimizer_step", "patch_embedding", "recomputed_layers"]

OPTIMIZERS = {  # names in the results of the headline's optimizers
    "o2": "nemo_lowprec O2: FP16 weights, FP8 gradients, FP8+FP16 states",
    "o3": "nemo_lowprec O3: O2 with FP8 weights and FP16 masters",
    "masters": "nemo_lowprec: BF16 weights, FP32 masters and states",
    "te low-bit": "TE FusedAdam, FP16 weights and masters, FP8+FP16 states",
    "te masters": "TE FusedAdam, BF16 weights, FP32 masters and states",
}


def host() -> str:
    """Host time of a layer, from host_h200.jsonl."""
    origins, figures = read(RESULTS / "host_h200.jsonl")
    by_name = {f["name"]: f for f in figures}
    plain, te = by_name["nn.Linear"], by_name["te.Linear, FP8"]
    levels = [f for name, f in by_name.items() if name in CHART and CHART[name].has_fp8]
    low, high = (pick(f["ratio"] for f in levels) for pick in (min, max))
    takeaway = (
        f"A layer in FP8 takes the host {low:.2f} to {high:.2f} times as long as ``nn.Linear``, and ``te.Linear`` "
        f"{te['ratio']:.2f} times."
    )
    table = simple_table(
        ("Layer", "forward", "backward", "both", "× nn.Linear", "in a first step"),
        [
            (
                f["name"],
                *(f"{f[key]:.0f}" for key in ("forward_us", "backward_us", "both_us")),
                f"{f['ratio']:.2f}",
                f"{f['first_ratio']:.2f}",
            )
            for f in (plain, *levels, te)
        ],
    )
    return block(takeaway, table, origin(origins))


def recomputed_layers() -> str:
    """What CUDA graphs gain where layers are recomputed, from recomputed_layers_h200.jsonl."""
    origins, figures = read(RESULTS / "recomputed_layers_h200.jsonl")
    rows: dict[tuple[str, str], list[str]] = {}
    for f in sorted(figures, key=lambda f: (f["model"], f["sequence"] * f["batch"])):
        cells = f"{f['ratio']:.2f}", f"{f['no_graphs_ms']:.1f}", f"{f['gain']:.2f}"
        rows.setdefault((f["model"], f"{f['batch']} × {f['sequence']}"), []).extend(cells)
    levels = list(dict.fromkeys(f["level"] for f in figures))
    most = max(figures, key=lambda f: f["gain"])
    losses = [f for f in figures if f["gain"] < 1]
    takeaway = (
        f"Graphs make a step up to {most['gain']:.1f} × as fast, and no faster where the GPU takes "
        f"{min(f['ratio'] for f in losses):.1f} times as long as the host. Three columns for each of {levels[0]} and "
        f"{levels[1]}: the GPU's time over the host's in a layer's forward pass, ms of a step without graphs, and how "
        "many times as fast graphs make the step."
    )
    header = ("Layers of", "batch", *("GPU/host", "ms", "×") * len(levels))
    return block(takeaway, simple_table(header, [(*of, *cells) for of, cells in rows.items()]), origin(origins))


def optimizer_step() -> str:
    """The optimizer's step alone, from optimizer_step_h200.jsonl."""
    origins, figures = read(RESULTS / "optimizer_step_h200.jsonl")
    by_benchmark = {f["benchmark"]: f for f in figures}
    shapes, copy = by_benchmark["optimizer_step_shapes"], by_benchmark["optimizer_step_copy"]
    found = {f["name"]: f for f in figures if "of_copy" in f}
    o2, ours, te = (found[OPTIMIZERS[key]] for key in ("o2", "masters", "te masters"))
    takeaway = (
        f"The step of O2 reads and writes {o2['bytes_per_param']:.2f} bytes a parameter in {o2['ms']:.2f} ms, at "
        f"{100 * o2['of_copy']:.0f} % of copy bandwidth, and with BF16 weights and FP32 masters and states this "
        f"project's step is {times(ours, te)} as fast as that of Transformer Engine's FusedAdam."
    )
    table = simple_table(
        (
            "Optimizer", "ms: median (min – max)", "bytes moved/param", "GB/s", "of copy bandwidth, %",
            "state bytes/param", "temporaries bytes/param",
        ),
        [
            (
                name,
                milliseconds(f, 2),
                f"{f['bytes_per_param']:.2f}",
                f"{f['gb_per_s']:,}",
                f"{100 * f['of_copy']:.1f}",
                f"{f['state_bytes_per_param']:.2f}",
                f"{f['temporaries_bytes_per_param']:.2f}",
            )
            for name, f in found.items()
        ],
    )  # fmt: skip
    about = f"{shapes['parameters']:,} parameters in {shapes['tensors']} tensors; copy: {copy['gb_per_s']:,} GB/s."
    return block(takeaway, table, f"{about} {origin(origins, 'torchao')}")


def backends() -> str:
    """Errors and times of the backends' GEMMs, from backends_h200.jsonl."""
    origins, figures = read(RESULTS / "backends_h200.jsonl")
    cells: dict[tuple[str, str], dict[str, dict]] = {}
    for f in figures:
        if "to_float64" in f:
            cells.setdefault((f["scaling"], f["backend"]), {})[f["gemm"]] = f
    times = {(f.get("scaling"), f["backend"]): f["ms"] for f in figures if f["benchmark"] == "backends_time"}
    half, delayed = times[None, "bf16"], times["delayed", "te"]
    furthest = max(
        g["to_reference"] for (_, backend), gemms in cells.items() if backend != "reference" for g in gemms.values()
    )
    takeaway = (
        f"With delayed scaling a layer's quantization and GEMMs take {delayed:.2f} ms on Transformer Engine where BF16 "
        f"GEMMs take {half:.2f} ({half / delayed:.2f} × as fast), and no backend's result is further than "
        f"{100 * furthest:.3f} % from the reference backend's."
    )
    rows: list[tuple[str, ...]] = [("none: BF16", "torch", "–", "–", "–", f"{half:.2f}")]
    for key, gemms in cells.items():
        errors = (f"{100 * g['to_float64']:.2f} ({100 * g['to_reference']:.3f})" for g in gemms.values())
        rows.append((*key, *errors, f"{times[key]:.2f}" if key in times else "–"))
    table = simple_table(("Scaling", "Backend", "fprop", "dgrad", "wgrad", "ms at Llama-8B's MLP"), rows)
    return block(takeaway, table, origin(origins))


def casts() -> str:
    """Speed of quantization, from backends_h200.jsonl, whose command stands below the table ``backends``."""
    figures = [f for f in read(RESULTS / "backends_h200.jsonl")[1] if f["benchmark"] == "backends_cast"]
    by_operand: dict[str, dict[str, int]] = {}
    for f in figures:
        by_operand.setdefault(f["operand"], {})[f["name"]] = f["gb_per_s"]
    ratios = [of["te backend"] / of["Transformer Engine"] for of in by_operand.values()]
    takeaway = (
        f"The ``te`` backend quantizes at {min(ratios):.2f} to {max(ratios):.2f} × the speed of Transformer "
        "Engine's own kernels."
    )
    table = simple_table(
        ("Quantization in both orientations", "Operand", "GB/s: median (min – max)"),
        [
            (f["name"], f"{f['operand']}, {f['shape']}", f"{f['gb_per_s']} ({f['gb_per_s_min']} – {f['gb_per_s_max']})")
            for f in figures
        ],
    )
    return block(takeaway, table)


def patch_embedding() -> str:
    """The GPU's time for each layer, by contestant."""
    origins, figures = read(RESULTS / "patch_embedding_h200.jsonl")
    by: dict[str, dict[str, Any]] = {}
    for f in figures:
        by.setdefault(f["layer"], {})[f["name"]] = f["gpu_ms"]
    names = list(dict.fromkeys(f["name"] for f in figures))
    shares = [min(times[name] for name in names[2:]) / times["cuDNN"] for times in by.values()]
    takeaway = (
        f"At the faster of the two levels a layer takes {min(shares):.2f} to {max(shares):.2f} of the GPU's time that"
        " cuDNN's convolution takes."
    )
    rows = [(layer, *(f"{times[name]:.2f}" for name in names)) for layer, times in by.items()]
    return block(takeaway, simple_table(("Layer", *names), rows), origin(origins))

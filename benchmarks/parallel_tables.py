"""Tables and pictures of what several GPUs do together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.llama import BATCH, SEQUENCE
from benchmarks.pictures import Picture, bars
from benchmarks.record import RESULTS, lines, read
from benchmarks.rst import block, milliseconds, origin, simple_table, times
from nemo_lowprec.chart import CHART
from nemo_lowprec.comm.bucketing import BUCKET_BYTES

__all__ = [
    "FSDP2", "averages", "gradient_sync", "gradient_sync_links", "gradient_sync_machines", "on_all_gpus",
    "parallel_parity", "parallel_single", "replicated", "replicated_picture", "sharded", "sharded_picture",
    "steps_over_links",
]  # fmt: skip

FSDP2 = "lightning FSDP2, FP32 shards gathered in bf16"
_FILE = RESULTS / "parallel_step_h200.jsonl"
_AVERAGES = RESULTS / "gradient_sync_h200.jsonl"
_REPLICATED = {  # what the others are called in pictures
    "lightning TransformerEnginePrecision, bf16 weights, no masters, ddp": (
        "Lightning's Transformer Engine, DDP,\nBF16 weights, no masters, head in FP8"
    ),
    "lightning bf16-true, ddp": "Lightning's bf16-true, DDP,\nBF16 weights, no masters",
    "lightning bf16-mixed, ddp": "Lightning's bf16-mixed, DDP, FP32 weights",
}
_SHARDED = {
    "torchao float8 all-gather, FP32 shards, compiled layers, FSDP2": (
        "torchao float8, FSDP2, compiled layers,\nFP32 shards gathered in FP8"
    ),
    FSDP2: "Lightning's FSDP2,\nFP32 shards gathered in BF16",
    "lightning FSDP2, bf16-true": "Lightning's FSDP2, BF16 shards, no masters",
}


def averages() -> dict[int, dict[str, dict[str, Any]]]:
    """Figures of gradient_sync_h200.jsonl, by number of GPUs and contestant."""
    found: dict[int, dict[str, dict[str, Any]]] = {}
    for f in read(_AVERAGES)[1]:
        found.setdefault(f["gpus"], {})[f["contestant"]] = f
    return dict(sorted(found.items()))


def gradient_sync() -> str:
    """Time to average gradients."""
    found = averages()
    ours = f"fp8, buckets of {BUCKET_BYTES >> 20} MiB"
    said = [
        f"{times(of[ours], of['bf16 all_reduce'])} as fast as NCCL's BF16 all_reduce on {gpus} GPUs (relative error "
        f"{of[ours]['error']:.3f} beside {of['bf16 all_reduce']['error']:.3f})"
        for gpus, of in found.items()
    ]
    takeaway = f"Averaging in FP8, quantization included, is {' and '.join(said)}."
    header = ["Gradients averaged by"]
    for gpus in found:
        header += [f"{gpus} GPUs, ms: median (min – max)", "of bf16", "MB sent", "relative error"]
    rows = []
    for name in next(iter(found.values())):
        row = [name]
        for of in found.values():
            f = of[name]
            error = f"{f['error']:.4f}" if "error" in f else "–"
            row += [milliseconds(f, 3), f"{f['of_bf16']:.3f}", f"{f['bytes_sent'] / 1e6:,.0f}", error]
        rows.append(row)
    return block(takeaway, simple_table(header, rows), origin(read(_AVERAGES)[0]))


def gradient_sync_links() -> str:
    """Time to average gradients of two GPUs over slower links, by what NCCL's environment variables turn off."""
    origins = [of for of in read(_AVERAGES)[0] if of["gpus"] == 2]
    runs = [averages()[2]]
    for line in lines(RESULTS / "gradient_sync_links_h200.jsonl"):
        if "command" in line:
            origins.append(line)
            runs.append({})
        else:
            runs[-1][line["contestant"]] = line
    ours = f"fp8, buckets of {BUCKET_BYTES >> 20} MiB"
    parts: dict[str, list[float]] = {}
    rows = []
    for of, run in zip(origins, runs, strict=True):
        fp8, bf16 = run[ours], run["bf16 all_reduce"]
        link, digits = _link(bf16), 1 if bf16["ms"] > 10 else 2
        rows.append((link, of["date"], milliseconds(bf16, digits), milliseconds(fp8, digits), f"{fp8['of_bf16']:.3f}"))
        parts.setdefault(link, []).append(fp8["of_bf16"])
    rows.sort(key=lambda row: list(parts).index(row[0]))
    said = ", ".join(f"{' and '.join(f'{part:.2f}' for part in of)} through {link}" for link, of in parts.items())
    takeaway = f"FP8 averaging takes these parts of the time of BF16's all_reduce: {said}."
    header = ("Through", "on", "BF16 all_reduce, ms", "FP8, ms: median (min – max)", "of bf16")
    return block(takeaway, simple_table(header, rows), origin(origins))


def _link(figure: dict[str, Any]) -> str:
    """The link between two GPUs that NCCL's environment variables left on."""
    nccl = figure.get("nccl", {})
    if "NCCL_SHM_DISABLE" in nccl:
        return "sockets"
    return "CPU memory" if "NCCL_P2P_DISABLE" in nccl else "GPU memory"


def gradient_sync_machines(path: Path = RESULTS / "gradient_sync_machines.jsonl", mib: int = 1) -> str:
    """Time to average gradients of two machines with a slow network between them, in buckets of ``mib`` MiB."""
    origins, figures = read(path)
    found = {f["contestant"]: f for f in figures}
    shown = {
        "BF16 all_reduce": "bf16 all_reduce",
        "FP8, all processes at once": f"fp8, at once, buckets of {mib} MiB",
        "FP8, within machines first": f"fp8, buckets of {mib} MiB",
    }
    of = {title: found[name] for title, name in shown.items()}
    _, flat, ours = of.values()
    network = f"{ours['mbit']} Mbit/s" if "mbit" in ours else "NCCL's sockets"
    takeaway = (
        f"Between two machines of {ours['processes'] // 2} processes each, over {network}, FP8 averaging "
        f"takes {ours['of_bf16']:.2f} of the time of BF16's all_reduce, and {flat['of_bf16']:.2f} where it averages "
        "over all processes at once."
    )
    rows = [
        (
            title, milliseconds(f, 0), f"{f['of_bf16']:.3f}",
            *([f"{f['mb_between']:.1f}"] if "mb_between" in f else []), f"{f['error']:.3f}",
        )
        for title, f in of.items()
    ]  # fmt: skip
    between = ["MB between"] if "mb_between" in ours else []
    header = ("Averaging", "ms: median (min – max)", "of bf16", *between, "error")
    return block(takeaway, simple_table(header, rows), origin(origins))


def steps_over_links() -> str:
    """Whole steps of two GPUs over sockets, and of two machines that share them."""
    origins, figures = read(RESULTS / "parallel_step_links_h200.jsonl")
    shown = [f for f in figures if f["gpus"] > 1]
    mixed, o2 = "lightning bf16-mixed, ddp", "msamp_o2, lowprec_ddp"
    rows, said = [], []
    for machines, name in {1: "one machine", 2: "two machines"}.items():
        of = {f["name"]: f for f in shown if f.get("machines", 1) == machines}
        said.append(f"{times(of[o2], of[mixed], 1)} ({name})")
        for f in sorted(of.values(), key=lambda f: f["ms"]):
            rows.append((name, f["name"], milliseconds(f, 0), times(f, of[mixed], 1), f"{f['bytes_sent'] / 1e9:.1f}"))
    takeaway = f"Through sockets ``msamp_o2`` is {' and '.join(said)} as fast as Lightning's ``bf16-mixed``."
    header = ("On", "Contestant", "ms: median (min – max)", "as fast", "GB sent")
    return block(takeaway, simple_table(header, rows), origin(origins))


def _figures() -> list[dict[str, Any]]:
    return sorted(read(_FILE)[1], key=lambda f: -f["tokens_per_s"])


def on_all_gpus() -> dict[str, dict[str, Any]]:
    """Whole steps on the most GPUs that were measured, by contestant."""
    figures = _figures()
    gpus = max(f["gpus"] for f in figures)
    return {f["name"]: f for f in figures if f["gpus"] == gpus}


def _is_sharded(name: str) -> bool:
    return "sharded" in name or "FSDP2" in name


def _table(figures: list[dict[str, Any]]) -> str:
    return simple_table(
        (
            "Contestant", "tokens/s", "of as many single ones", "ms a step: median (min – max)", "peak GiB a GPU",
            "GB sent a step",
        ),
        [
            (
                f["name"],
                f"{f['tokens_per_s']:,}",
                f"{f['of_one_gpu']:.2f}" if "of_one_gpu" in f else "–",
                milliseconds(f, 1),
                f"{f['peak_gib']:.1f}",
                f"{f['bytes_sent'] / 1e9:.2f}" if "bytes_sent" in f else "–",
            )
            for f in figures
        ],
    )  # fmt: skip


def replicated() -> str:
    """Whole steps where each GPU holds the model."""
    found = on_all_gpus()
    o2, te = found["msamp_o2, lowprec_ddp"], found["te_fp8, lowprec_ddp"]
    ours, other = found["bf16_mixed, ddp"], found["lightning bf16-mixed, ddp"]
    takeaway = (
        f"With the same attention and head ``msamp_o2`` is {times(o2, te, 3)} as fast as ``te_fp8``, sending "
        f"{o2['bytes_sent'] / 1e9:.2f} GB a step where that sends {te['bytes_sent'] / 1e9:.2f}, and ``bf16_mixed`` "
        f"{times(ours, other, 3)} as fast as Lightning's ``bf16-mixed``."
    )
    return block(takeaway, _table([f for name, f in found.items() if not _is_sharded(name)]), origin(read(_FILE)[0]))


def sharded() -> str:
    """Whole steps where each GPU holds a part of the model; the commands stand below ``replicated``."""
    found = on_all_gpus()
    ours, other = found["bf16_mixed, lowprec_sharded"], found[FSDP2]
    least = min((f for name, f in found.items() if _is_sharded(name)), key=lambda f: f["peak_gib"])
    takeaway = (
        f"``bf16_mixed`` is {times(ours, other, 3)} as fast as Lightning's FSDP2 with the same formats, attention and "
        f"head, and the least memory a GPU is {least['peak_gib']:.1f} GiB, of {least['name']}."
    )
    return block(takeaway, _table([f for name, f in found.items() if _is_sharded(name)]))


def parallel_single() -> str:
    """The levels on one GPU, with the settings that they have on several."""
    figures = [f for f in _figures() if f["gpus"] == 1]
    found = {f["name"]: f for f in figures}
    first, te = figures[0], found["te_fp8"]
    takeaway = (
        f"``{first['name']}`` is the fastest, {times(first, te)} as fast as ``te_fp8`` with the same attention and "
        f"head, in {first['peak_gib']:.1f} GiB beside {te['peak_gib']:.1f}."
    )
    rows = [(f["name"], f"{f['tokens_per_s']:,}", milliseconds(f, 1), f"{f['peak_gib']:.1f}") for f in figures]
    return block(takeaway, simple_table(("Level", "tokens/s", "ms a step: median (min – max)", "peak GiB"), rows))


def _label(name: str) -> str:
    """Label of a contestant of nemo_lowprec, such as ``msamp_o2, ddp``."""
    level, strategy = name.split(", ")
    own = "cuDNN attention, head in FP8" if CHART[level].has_fp8 else "torch's attention, head in half precision"
    return f"nemo_lowprec {level}, {strategy},\n{own}"


def _picture(file: str, see: str, ours: list[str], others: dict[str, str]) -> Picture:
    found = on_all_gpus()
    gpus = f"{found[ours[0]]['gpus']} × {read(_FILE)[0][0]['gpu']}"
    xlabel = f"tokens/s (in brackets: GiB a GPU at the peak)\nbatch {BATCH} × {SEQUENCE} a GPU, {gpus}"
    shown = (
        "The other packages have torch's attention, and the head in half precision unless a bar says FP8. Bars: all "
        "that was measured of them, and five of this project's levels; the table below has the others."
    )
    return Picture(file, see, shown, bars(xlabel, list(found.values()), {name: _label(name) for name in ours} | others))


def replicated_picture() -> Picture:
    """Five levels and Lightning's contestants, each GPU with the whole model."""
    found = on_all_gpus()
    o2, te = found["msamp_o2, ddp"], found["te_fp8, ddp"]
    see = (
        f"``msamp_o2`` is {times(o2, te)} as fast as ``te_fp8`` with the same attention and head, in "
        f"{o2['peak_gib']:.1f} GiB a GPU beside {te['peak_gib']:.1f}."
    )
    levels = ("msamp_o2", "msamp_o3", "bf16_with_fp8_mixed", "te_fp8", "bf16_mixed")
    return _picture("parallel_replicated_h200.png", see, [f"{level}, ddp" for level in levels], _REPLICATED)


def sharded_picture() -> Picture:
    """Five levels, and FSDP2 as Lightning and torchao have it."""
    found = on_all_gpus()
    o2, ours, other = found["msamp_o2, lowprec_sharded"], found["bf16_mixed, lowprec_sharded"], found[FSDP2]
    see = (
        f"``msamp_o2`` takes {o2['peak_gib']:.1f} GiB a GPU, and the two whose settings are the same, "
        f"``bf16_mixed`` and Lightning's FSDP2 with FP32 shards, come to {ours['tokens_per_s']:,} and "
        f"{other['tokens_per_s']:,} tokens/s."
    )
    levels = ("msamp_o2", "msamp_o3", "fp16_with_fp8_mixed", "bf16_with_fp8_mixed", "bf16_mixed")
    return _picture("parallel_sharded_h200.png", see, [f"{level}, lowprec_sharded" for level in levels], _SHARDED)


def parallel_parity() -> str:
    """Validation losses on several GPUs beside one, from loss_parity_parallel_h200.jsonl."""
    origins, figures = read(RESULTS / "loss_parity_parallel_h200.jsonl")
    rows = sorted((f for f in figures if f["benchmark"] == "loss_parity"), key=lambda f: f["level"])
    losses = {f["level"]: f["val_loss"] for f in rows}
    gaps = [
        _gap(loss, losses[level])
        for name, loss in losses.items()
        for level, _, strategy in [name.partition("@")]
        if strategy
    ]
    takeaway = (
        f"On several GPUs the validation losses lie between {min(gaps):+.2f} % and {max(gaps):+.2f} % of those on one."
    )
    table = simple_table(
        ("Level", "strategy", "GPUs", "validation loss", "gap to one GPU, %", "gap to bf16_mixed on one GPU, %"),
        [
            (
                f"``{level}``",
                strategy or "–",
                str(f["gpus"]),
                f"{f['val_loss']:.4f}",
                f"{_gap(f['val_loss'], losses[level]):+.2f}" if strategy else "–",
                f"{_gap(f['val_loss'], losses['bf16_mixed']):+.2f}",
            )
            for f in rows
            for level, _, strategy in [f["level"].partition("@")]
        ],
    )
    return block(takeaway, table, origin(origins))


def _gap(loss: float, beside: float) -> float:
    """How far ``loss`` lies above ``beside``, in percent."""
    return (loss / beside - 1) * 100

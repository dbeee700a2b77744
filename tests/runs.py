"""Files of runs that no training wrote: the numbers of a small Llama, for tests of what reads such files."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from nemo_lowprec.chart import get_level
from nemo_lowprec.report.monitor.numbers import rounded
from nemo_lowprec.report.monitor.run_writer import FILE, FORMAT, RunWriter

__all__ = ["OPERANDS", "layer_names", "tear_last_line", "write_run"]

OPERANDS = ("input", "weight", "grad_output")
_KINDS = (
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "self_attn.o_proj",
    "mlp.up_proj",
    "mlp.down_proj",
)
_SQNR = {"input": 29.0, "weight": 31.0, "grad_output": 24.0}
_MIB = 2**20


def layer_names(blocks: int) -> list[str]:
    """Six layers a block."""
    return [f"model.layers.{block}.{kind}" for block in range(blocks) for kind in _KINDS]


def write_run(
    folder: Path,
    level: str = "bf16_with_fp8_mixed",
    *,
    blocks: int = 2,
    steps: int = 400,
    every: int = 20,
    seed: int = 0,
    spoiled: str | None = None,
    spoiled_from: int = 0,
    worse: float = 0.0,
    worse_from: int = 0,
    resumed_at: Sequence[int] = (),
    ended: bool = True,
) -> Path:
    """Write the file of a run.

    Args:
        folder: of the run.
        level: a row of the chart; one without FP8 GEMMs has no operands.
        blocks: of six layers.
        steps: that the run has taken.
        every: steps between two samples.
        seed: of the numbers; the noise of the batches is that of the seed at every level.
        spoiled: a layer whose input has outliers, from the step ``spoiled_from`` on.
        worse: what is added to the loss from the step ``worse_from`` on.
        resumed_at: steps after which the run was cut short, ten steps later, and resumed.
        ended: whether the run has ended in order.
    """
    row, random_, batches = get_level(level), random.Random(f"{level} {seed}"), random.Random(seed)
    writer, layers = RunWriter(folder), layer_names(blocks)
    spoils = {"spoiled": spoiled, "spoiled_from": spoiled_from}
    starts = [0, *resumed_at]
    for start, end in zip(starts, [*(at + 10 for at in resumed_at), steps], strict=True):
        writer.write("run", **_about(row, layers, start, every, seed))
        if row.has_fp8:
            writer.write("operands", rows=[[layer, operand] for layer in layers for operand in OPERANDS])
        writer.write("params", names=[f"{layer}.weight" for layer in layers])
        if not start:
            writer.write("audit", **_audit(row))
        for first in range(start + 1, end + 1, every):
            taken = range(first, min(first + every, end + 1))
            losses = [
                _loss(step, batches) + random_.gauss(0, 0.004) + (worse if step >= worse_from else 0) for step in taken
            ]
            seconds = len(taken) * (0.31 if row.has_fp8 else 0.42) * random_.uniform(0.97, 1.05)
            if first == start + 1:
                seconds += 8.0  # of warming up
            values = {"seconds": round(seconds, 4), "tokens": 16384 * len(taken), "peak_bytes": 9000 * _MIB + first}
            at = {"at": list(taken), "last": taken[-1], "steps": len(taken)}
            writer.write("steps", loss=rounded(torch.tensor(losses, dtype=torch.float64), 6), **at, **values)
            writer.write("sample", **_sample(row, layers, first, random_, **spoils))
            if first // every % 5 == 4:
                loss = losses[-1] + 0.05
                writer.write("validation", step=taken[-1], metrics={"val/loss": round(loss, 4)})
    if spoiled:
        text = "SQNR of the input fell to 9.2 dB: keep the layer in half precision with skip=[...]."
        writer.write("warning", step=spoiled_from + 1, layer=spoiled, operand="input", text=text)
    if ended:
        writer.write("end", step=steps)
    writer.close()
    return folder


def tear_last_line(folder: Path) -> None:
    """Cut the last line of the file short, as a kill does."""
    path = folder / FILE
    path.write_bytes(path.read_bytes()[:-30])


def _about(row: Any, layers: list[str], start: int, every: int, seed: int) -> dict[str, Any]:
    kept = {"lm_head": "the head", "model.embed_tokens": "an embedding"}
    reasons = dict.fromkeys([name for name in layers if name.endswith("k_proj")], "its GEMMs are too small to gain")
    return {
        "format": FORMAT,
        "start": start,
        "time": "2026-11-27T12:00:00+00:00",
        "seed": seed,
        "level": row.name,
        "options": "fp8_amax_history_len=16" if row.has_fp8 else "",
        "arguments": {"fp8_amax_history_len": 16} if row.has_fp8 else {},
        "declared": {name: cell for name, cell in row.columns(False).items() if name != "Level"},
        "model": "CausalLM",
        "parameters": 101_234_176,
        "engine": "single",
        "processes": 1,
        "device": "NVIDIA H200",
        "versions": {"nemo-lowprec": "0.1.0", "torch": "2.13.0", "lightning": "2.6.6", "python": "3.12.4"},
        "command": f"nemo-lowprec pretrain precision={row.name} model=llama_100m seed={seed}",
        "every_n_steps": every,
        "layers": {
            "low": layers if row.has_fp8 else [],
            "left": reasons if row.has_fp8 else {},
            "half": [] if row.has_fp8 else layers,
            "kept": kept,
            "fused": {"model.layers.0.mlp": "gated_mlp"},
        },
    }


def _audit(row: Any) -> dict[str, Any]:
    cells = row.columns(False)
    size = {"FP32": 4.0, "FP16": 2.0, "BF16": 2.0, "FP8": 1.03}
    findings, total = [], {}
    for column in ("Computation (GEMM)", "Weight", "Master weight", "Weight gradient", "Optimizer states", "Comm"):
        formats = cells[column].lower()
        stored = [size[f] for f in cells[column].split("+") if f in size and column != "Computation (GEMM)"]
        found = {"column": column, "part": "converted", "declared": formats, "observed": formats, "agrees": True}
        findings.append(found | {"bytes_per_param": sum(stored) if stored else None})
        if stored:
            total[column] = int(sum(stored) * 101_234_176)
    return {"findings": findings, "total_bytes": total, "places": {}}


def _loss(step: int, batches: random.Random) -> float:
    """At each step the levels train on one batch: most of the noise is the same for all of them."""
    return 3.2 + 6.0 * math.exp(-step / 60) + 1.5 * math.exp(-step / 400) + batches.gauss(0, 0.06)


def _sample(
    row: Any, layers: list[str], step: int, random_: random.Random, spoiled: str | None, spoiled_from: int
) -> dict[str, Any]:
    metrics: dict[str, list[float]] = {
        m: [] for m in ("amax", "scale", "underflow", "saturation", "sqnr", "binades", "nonfinite")
    }
    for depth, layer in enumerate(layers if row.has_fp8 else []):
        for operand in OPERANDS:
            bad = layer == spoiled and operand == "input" and step > spoiled_from
            amax = (2.0e-4 if operand == "grad_output" else 1.5) * (1 + depth / 20) * random_.lognormvariate(0, 0.2)
            amax *= 900 if bad else 1
            underflow = (1.2 if operand == "grad_output" else 0.3) * random_.lognormvariate(0, 0.4)
            sqnr = _SQNR[operand] - depth / len(layers) * 2 + random_.gauss(0, 0.5)
            metrics["amax"].append(amax)
            metrics["scale"].append(448 / amax)
            metrics["underflow"].append(min(99.0, underflow * (200 if bad else 1)))
            metrics["saturation"].append(0.0 if random_.random() < 0.9 else 0.002)
            metrics["sqnr"].append(9.2 + random_.gauss(0, 0.6) if bad else sqnr)
            metrics["binades"].append(18 + random_.gauss(0, 1) + (10 if bad else 0))
            metrics["nonfinite"].append(0)
    params: dict[str, list[float]] = {
        "lost": [30 * random_.lognormvariate(0, 0.3) if row.is_low_bit else 0.0 for _ in layers]
    }
    if row.is_low_bit:
        params |= {
            name: [db + random_.gauss(0, 1) for _ in layers]
            for name, db in (
                ("weight_sqnr", 66.0),
                ("gradient_sqnr", 30.0),
                ("first_sqnr", 31.0),
                ("second_sqnr", 60.0),
            )
        }
    return {
        "step": step,
        "operands": {name: rounded(torch.tensor(of_rows).double()) for name, of_rows in metrics.items()},
        "params": {name: rounded(torch.tensor(of_rows).double()) for name, of_rows in params.items()},
        "wire": {"sqnr": round(30 + random_.gauss(0, 0.3), 2) if row.comm == "fp8" else None},
        "grad_norm": round(0.4 + random_.random() * 0.1, 4),
        "loss_scale": 65536.0 if row.has_loss_scale else None,
        "skipped_steps": 0,
    }

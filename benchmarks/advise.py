"""``advise`` beside real steps: bytes and time of a step that it expects of each level, and those of a training.

    python -m benchmarks.advise

Llama-3-8B at full size where training fits the GPU, the same with 12 of its 32 layers for levels whose training does
not, and a Llama of 100M parameters. Layers are recomputed in backward, as in the benchmark ``llama_8b``, by which the
real steps are measured. ``left_gib`` is what a training leaves of an H100 and of an H200. Each level, and each advice,
has a process of its own. ``--append`` measures further cases into the same file.
"""

from __future__ import annotations

import argparse
import multiprocessing
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any, NamedTuple

import torch

from benchmarks.llama_8b import GIB, VOCAB, RandomTokens, measure
from benchmarks.record import Record, arguments, lines

LEVELS = [
    "bf16_mixed", "bf16_with_fp8_mixed", "bf16_with_fp8_current_scaling_mixed", "te_fp8", "msamp_o1", "msamp_o2",
    "msamp_o3",
]  # fmt: skip


class Case(NamedTuple):
    """A model and a batch.

    Attributes:
        name: of the figures.
        preset: of ``CausalLM``.
        config: on top of the preset.
        batch: sequences.
        sequence: tokens of each.
    """

    name: str
    preset: str
    config: dict[str, Any]
    batch: int
    sequence: int


CASES = {
    "llama_8b": Case("llama_8b", "llama3_8b", {}, 1, 8192),
    "llama_8b_12_layers": Case("llama_8b_12_layers", "llama3_8b", {"num_hidden_layers": 12}, 1, 8192),
    "llama_100m": Case("llama_100m", "llama_100m", {}, 8, 2048),
    "llama_tiny": Case("llama_tiny", "llama_tiny", {}, 2, 64),  # without a GPU
}
DEFAULT = ["llama_8b", "llama_8b_12_layers", "llama_100m"]


def expected(case: Case, levels: Sequence[str]) -> dict[str, Any]:
    """What ``advise`` says: its seconds, and by level the bytes, the milliseconds and the layers kept back."""
    from nemo_lowprec import advise
    from nemo_lowprec.models import CausalLM
    from nemo_lowprec.report import memory_of

    model = CausalLM(preset=case.preset, config=case.config, vocab_size=VOCAB, activation_checkpointing=True)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model.configure_model()
    model.cpu()
    batch = next(iter(RandomTokens(case.sequence, case.batch)))
    start = time.perf_counter()
    found = advise(model, batch, levels)
    seconds = time.perf_counter() - start
    by_level = {
        level.name: {
            "expected_gib": round(level.choice.total / GIB, 2),
            "expected_ms": None if level.ms is None else round(level.ms, 1),
            "kept_back": len(level.kept_back),
            "left_gib": {gpu: round((memory_of(gpu) - level.choice.total) / GIB, 2) for gpu in ("H100", "H200")},
        }
        for level in found.levels
    }
    best = None if found.best is None else found.best.name
    return {
        "seconds": round(seconds, 1), "best": best, "sqnr": found.sqnr, "notes": list(found.notes),
        "refused": found.refused, "levels": by_level,
    }  # fmt: skip


def alone(task: Callable[..., dict[str, Any]], *given: Any) -> dict[str, Any]:
    """What ``task`` returns in a process of its own, or its error."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        try:
            return pool.submit(task, *given).result()
        except BrokenProcessPool:  # killed, for memory of the host for example
            return {"error": "its process was killed"}


def beside(told: dict[str, Any], real: dict[str, Any]) -> dict[str, Any]:
    """What was expected of a level, what was measured, and the ratios of both."""
    figures = {**told, **{k: real[k] for k in ("ms", "peak_gib", "parameters", "error") if k in real}}
    if real.get("peak_gib"):
        figures["bytes_of_real"] = round(told["expected_gib"] / real["peak_gib"], 3)
    if "ms" in real and told["expected_ms"] is not None:
        figures["time_of_real"] = round(told["expected_ms"] / real["ms"], 3)
    return figures


def main() -> None:
    parser: argparse.ArgumentParser = arguments(__doc__.split("\n")[0], "advise_h200.jsonl")
    parser.add_argument("--cases", nargs="*", default=DEFAULT, choices=list(CASES))
    parser.add_argument("--levels", nargs="*", default=LEVELS)
    parser.add_argument("--rounds", type=int, default=2, help="rounds of steps of a real training")
    parser.add_argument("--append", action="store_true", help="keep the figures that the file of results has")
    args = parser.parse_args()
    record = Record(args.out, lines(args.out) if args.append and args.out.exists() else ())
    room = torch.cuda.get_device_properties(0).total_memory / GIB if torch.cuda.is_available() else float("inf")
    for case in (CASES[name] for name in args.cases):
        shape = {"case": case.name, "batch": case.batch, "sequence": case.sequence}
        told = alone(expected, case, args.levels)
        levels = told.pop("levels", {})
        record.add(benchmark="advise", **shape, **told)
        for level, figures in levels.items():
            real = {"error": "not run: does not fit by the plan"}
            if figures["expected_gib"] < room:
                real = alone(measure, level, case.preset, case.config, case.sequence, args.rounds, case.batch)
            record.add(benchmark="advise_level", **shape, level=level, **beside(figures, real))


if __name__ == "__main__":
    main()

"""Whole steps of a Llama-8B-shaped GPTModel: MegatronStrategy, a bare Megatron-core loop, and transformers' model.

    python -m benchmarks.megatron_step

Eight layers of Llama-3-8B's shape, batch 2 of 4096 tokens a GPU, gradients clipped to norm 1. The bare loop has the
same configs, kernels and fused weight gradients, and Megatron-core's own optimizer (Transformer Engine's FusedAdam).
Paths are trained in turn, each in processes of its own, and rounds repeat that; a figure is the median over rounds of
twenty steps, of the slowest process. ``of_bare`` is the bare loop's time over the path's in the same round, the median
of them. Figures of levels and paths that are not measured again stay.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import traceback
from itertools import product
from pathlib import Path

import torch

from benchmarks.llama import BATCH, SEQUENCE
from benchmarks.megatron_model import bare, on_gpus, transformers_path, with_strategy
from benchmarks.record import Record, arguments, earlier, lines

PATHS = {"bare loop": bare, "MegatronStrategy": with_strategy, "transformers": transformers_path}
LEVELS = ["bf16_mixed", "bf16_with_fp8_mixed", "bf16_with_fp8_mixed+fp8_params", "msamp_o2+fp16", "msamp_o3+fp16"]


def work(rank: int, gpus: int, level: str, name: str, index: int, out: str) -> None:
    """One process: the first one appends (level, round, path, seconds, GiB or the error) to ``out``."""
    try:
        seconds, gib = PATHS[name](level, gpus)
        found = {"seconds": seconds, "gib": gib}
    except Exception as error:
        traceback.print_exc()
        found = {"error": f"{type(error).__name__}: {error}"[:300]}
    if rank == 0:
        with Path(out).open("a") as file:
            file.write(json.dumps({"level": level, "round": index, "path": name, **found}) + "\n")


def main() -> None:
    parser = arguments(__doc__.split("\n")[0], "megatron_step_h200.jsonl")
    parser.add_argument("--levels", nargs="*", default=LEVELS)
    parser.add_argument("--paths", nargs="*", choices=PATHS, default=list(PATHS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--gpus", type=int, default=torch.cuda.device_count())
    args = parser.parse_args()
    with tempfile.NamedTemporaryFile() as file:
        try:
            for level, index, name in product(args.levels, range(args.rounds), args.paths):
                on_gpus(args.gpus, work, level, name, index, file.name)
        finally:
            if runs := lines(Path(file.name)):
                write(args.out, runs, args.gpus)


def write(out: Path, runs: list[dict], gpus: int) -> None:
    """A figure for every level and path, beside those that were not measured again."""
    again = {(f["level"], f["path"], gpus) for f in runs}
    kept = [f for f in earlier(out, "megatron_step") if (f.get("level"), f.get("path"), f["gpus"]) not in again]
    record = Record(out, kept)
    seconds = {(f["level"], f["path"], f["round"]): f["seconds"] for f in runs if "seconds" in f}
    for level, path in dict.fromkeys((f["level"], f["path"]) for f in runs):
        mine = {r: s for (lev, p, r), s in seconds.items() if (lev, p) == (level, path)}
        about = {"benchmark": "megatron_step", "level": level, "path": path, "gpus": gpus}
        if not mine:
            record.add(**about, error=next(f["error"] for f in runs if (f["level"], f["path"]) == (level, path)))
            continue
        median = statistics.median(mine.values())
        beside = [seconds[level, "bare loop", r] / s for r, s in mine.items() if (level, "bare loop", r) in seconds]
        record.add(
            **about, ms=round(median * 1e3, 2), ms_min=round(min(mine.values()) * 1e3, 2),
            ms_max=round(max(mine.values()) * 1e3, 2), rounds=len(mine),
            tokens_per_s_per_gpu=round(BATCH * SEQUENCE / median),
            of_bare=round(statistics.median(beside), 4) if beside else None,
            peak_gib=round(max(f["gib"] for f in runs if (f["level"], f["path"]) == (level, path) and "gib" in f), 2),
        )  # fmt: skip


if __name__ == "__main__":
    main()

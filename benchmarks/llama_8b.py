"""Llama-3-8B at full size, all parameters trained with AdamW, sequence 8192, on one GPU under the Lightning Trainer.

    python -m benchmarks.llama_8b

A level may have options: those of the level, as ``msamp_o2, activations=fp8+recompute``, and ``recomputed``, the number
of layers that are recomputed in backward: all of them without it, and none with ``activations``. The peak counts from
the second step on, when everything that training keeps is there; those of setting up and of the first step stand beside
it. Each level has a process of its own.
"""

from __future__ import annotations

import multiprocessing
import statistics
import traceback
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from benchmarks.measure import Watch
from benchmarks.record import Record, arguments
from nemo_lowprec.models import CausalLM
from nemo_lowprec.plugins import LEVELS

VOCAB, GIB = 128_256, 2**30
WARMUP, ROUND = 14, 2  # steps: CUDA graphs come at the 13th at the latest
DEFAULT = [
    "msamp_o2", "msamp_o3", "bf16_mixed", "msamp_o2, activations=fp8+recompute",
    "msamp_o2, head=fp8, activations=fp8+recompute, recomputed=10", "msamp_o2, head=fp8, activations=recompute",
    "msamp_o2, head=fp8, recomputed=0",
]  # fmt: skip


class RandomTokens(IterableDataset):
    """Endless batches of ``batch`` sequences of random tokens."""

    def __init__(self, sequence: int, batch: int = 1) -> None:
        self.sequence, self.batch = sequence, batch

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        generator = torch.Generator().manual_seed(0)
        while True:
            tokens = torch.randint(VOCAB, (self.batch, self.sequence + 1), generator=generator)
            yield {"input_ids": tokens[:, :-1], "labels": tokens[:, 1:]}


class _Model(CausalLM):
    """Recomputes the first ``recomputed`` layers alone."""

    recomputed: int | None = None

    def configure_model(self) -> None:
        super().configure_model()
        for i, layer in enumerate(self.model.model.layers):  # type: ignore[union-attr, arg-type]
            layer.gradient_checkpointing = self.recomputed is None or i < self.recomputed


class _NoTearDown(pl.Callback):
    """The optimizer's states in FP32, which a torn down plugin gives back, have no room on the GPU."""

    def on_train_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        trainer.precision_plugin.teardown = lambda: None  # type: ignore[method-assign]


def run(level: str, preset: str, config: dict[str, Any], sequence: int, watch: Watch, batch: int = 1) -> int:
    """Train; returns the number of parameters."""
    name, *options = level.split(", ")
    given: dict[str, Any] = dict(option.split("=") for option in options)
    recomputed = given.pop("recomputed", 0 if "activations" in given else None)
    module = _Model(
        preset=preset, config=config, vocab_size=VOCAB, lr=1e-5, min_lr=1e-6, warmup_steps=0,
        activation_checkpointing=True,
    )  # fmt: skip
    module.recomputed = None if recomputed is None else int(recomputed)
    # configure_model makes the weights on the GPU, where conversion turns them into the level's one by one.
    trainer = pl.Trainer(
        accelerator="auto", devices=1, max_steps=watch.steps, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, callbacks=[watch, _NoTearDown()],
        plugins=LEVELS[name](**given),
    )  # fmt: skip
    trainer.fit(module, DataLoader(RandomTokens(sequence, batch), batch_size=None))
    return sum(p.numel() for p in module.parameters())


def measure(
    level: str, preset: str, config: dict[str, Any], sequence: int, rounds: int, batch: int = 1
) -> dict[str, Any]:
    """The figures of a level, or its error."""
    watch = Watch(rounds, every=ROUND, warmup=WARMUP, settled=1)
    try:
        count = run(level, preset, config, sequence, watch, batch)
    except Exception as error:
        traceback.print_exc()
        return {"error": f"{type(error).__name__}: {error}"[:300]}
    seconds = statistics.median(watch.rounds)
    return {
        "parameters": count, "tokens_per_s": round(batch * sequence / seconds), "ms": round(seconds * 1e3, 1),
        "ms_min": round(min(watch.rounds) * 1e3, 1), "ms_max": round(max(watch.rounds) * 1e3, 1),
        "rounds": len(watch.rounds), "peak_gib": round(watch.peak / GIB, 2),
        "peak_reserved_gib": round(watch.peak_reserved / GIB, 2), "setup_peak_gib": round(watch.setup_peak / GIB, 2),
        "first_step_peak_gib": round(watch.first_steps_peak / GIB, 2), "skipped_steps": watch.skipped,
        "gib_at_peak": {k: round(v / GIB, 2) for k, v in watch.columns.items()},
    }  # fmt: skip


def main() -> None:
    parser = arguments(__doc__.split("\n")[0], "llama_8b_h200.jsonl")
    parser.add_argument("--levels", nargs="*", default=DEFAULT)
    parser.add_argument("--rounds", type=int, default=4, help=f"rounds of {ROUND} steps; {WARMUP} steps come before")
    parser.add_argument("--preset", default="llama3_8b")
    parser.add_argument("--layers", type=int, help="the preset's without")
    parser.add_argument("--sequence", type=int, default=8192)
    args = parser.parse_args()
    config = {} if args.layers is None else {"num_hidden_layers": args.layers}
    record = Record(args.out)
    spawn = multiprocessing.get_context("spawn")
    for level in args.levels:
        # A trained model is not torn down: the end of its process frees its memory.
        with ProcessPoolExecutor(1, spawn) as pool:
            try:
                found = pool.submit(measure, level, args.preset, config, args.sequence, args.rounds).result()
            except BrokenProcessPool:  # killed, for memory of the host for example
                found = {"error": "its process was killed"}
        record.add(benchmark="llama_8b", level=level, sequence=args.sequence, **found)


if __name__ == "__main__":
    main()

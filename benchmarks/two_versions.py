"""Whole training steps of two versions of this package, in turn: Llamas of three sizes at two levels.

python -m benchmarks.two_versions ../earlier

The folder holds the other version's ``nemo_lowprec``. Each turn is one process of either version, and the order changes
from turn to turn: the host's speed differs between processes by more than two versions do. ``gpu_ms`` is the time that
kernels take in a step.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

LEVELS = ("bf16_with_fp8_mixed", "msamp_o2")
# hidden size, intermediate size, layers, heads, key-value heads, vocabulary; batch, sequence; steps in a round
SHAPES = {
    "100M": (768, 2048, 12, 12, 12, 8192, 8, 256, 20),
    "1.1B": (2048, 5632, 22, 32, 4, 32_000, 1, 512, 10),
    "8B-shaped, 8 layers": (4096, 14336, 8, 32, 8, 32_768, 2, 4096, 5),
}
_WARMUP, _PROFILED = 6, 4  # steps


def measure(shape: str, level: str, rounds: int) -> dict[str, Any]:
    """Milliseconds of a step: of each round, and of its kernels. Of the package that is imported here."""
    import lightning.pytorch as pl
    import torch
    import torch.nn.functional as F
    from torch.profiler import ProfilerActivity, profile
    from transformers import LlamaConfig, LlamaForCausalLM

    from nemo_lowprec import plugins

    hidden, intermediate, layers, heads, kv_heads, vocabulary, batch, sequence, steps = SHAPES[shape]

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            config = LlamaConfig(
                vocab_size=vocabulary, hidden_size=hidden, intermediate_size=intermediate, num_hidden_layers=layers,
                num_attention_heads=heads, num_key_value_heads=kv_heads, max_position_embeddings=sequence,
                use_cache=False, attn_implementation="sdpa", tie_word_embeddings=False,
            )  # fmt: skip
            torch.manual_seed(0)
            with torch.device("cuda"):
                self.model = LlamaForCausalLM(config).train()

        def training_step(self, tokens: Any, index: int) -> Any:
            logits = self.model(input_ids=tokens[:, :-1]).logits
            return F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=1e-5, fused=True)

    class Clock(pl.Callback):
        def __init__(self) -> None:
            self.rounds: list[float] = []
            self.gpu = 0.0
            self._start = 0.0
            self._profile: Any = None

        def on_train_batch_start(self, trainer: Any, module: Any, tokens: Any, index: int) -> None:
            last = _WARMUP + steps * rounds
            if index < _WARMUP or (index < last and (index - _WARMUP) % steps):
                return
            torch.cuda.synchronize()
            now = time.perf_counter()
            if index > _WARMUP and index <= last:
                self.rounds.append((now - self._start) / steps * 1e3)
            self._start = now
            if index == last:
                self._profile = profile(activities=[ProfilerActivity.CUDA])
                self._profile.__enter__()
            elif index == last + _PROFILED:
                self._profile.__exit__(None, None, None)
                self.gpu = sum(k.self_device_time_total for k in self._profile.key_averages()) / _PROFILED / 1e3

    clock = Clock()
    fit = pl.Trainer(
        accelerator="gpu", devices=1, max_steps=_WARMUP + steps * rounds + _PROFILED + 1, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, callbacks=[clock],
        plugins=plugins.LEVELS[level](),
    )  # fmt: skip
    fit.fit(Module(), _batches(vocabulary, batch, sequence + 1))
    return {"rounds": clock.rounds, "gpu_ms": clock.gpu}


def _batches(vocabulary: int, *size: int) -> Iterator[Any]:
    import torch

    made = [torch.randint(vocabulary, size, generator=torch.Generator().manual_seed(i)).pin_memory() for i in range(8)]
    while True:
        yield from made


def in_a_process(package: Path, shapes: list[str], rounds: int) -> dict[tuple[str, str], dict[str, Any]]:
    """``measure`` of every shape and level, with the ``nemo_lowprec`` in the folder ``package``."""
    path = os.pathsep.join([str(package.resolve()), *filter(None, [os.environ.get("PYTHONPATH")])])
    # -P: or this file's own folder would come first.
    command = [sys.executable, "-P", __file__, "--measure", json.dumps([shapes, rounds])]
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{package}: {done.stderr[-2000:]}")
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"shape"')]
    return {(f["shape"], f["level"]): f for f in found}


def main() -> None:
    from benchmarks.record import Record, arguments

    parser = arguments(__doc__.split("\n")[0], "two_versions_h200.jsonl")
    parser.add_argument("other", type=Path, help="folder of the other version")
    parser.add_argument("--turns", type=int, default=4, help="processes of each version")
    parser.add_argument("--rounds", type=int, default=8, help="of a shape and level in a process")
    parser.add_argument("--shapes", nargs="*", choices=SHAPES, default=list(SHAPES))
    args = parser.parse_args()
    versions = {"other": args.other, "this": Path(__file__).parents[1]}
    found: dict[tuple[str, str, str], list[dict[str, Any]]] = defaultdict(list)
    for turn in range(args.turns):
        for name in list(versions)[:: 1 if turn % 2 == 0 else -1]:
            for key, figures in in_a_process(versions[name], args.shapes, args.rounds).items():
                found[name, *key].append(figures)
    record = Record(args.out)
    for (name, shape, level), turns in found.items():
        rounds = [value for figures in turns for value in figures["rounds"]]
        record.add(
            benchmark="two_versions", version=name, shape=shape, level=level, ms=round(statistics.median(rounds), 3),
            ms_min=round(min(rounds), 3), ms_max=round(max(rounds), 3), rounds=len(rounds),
            gpu_ms=round(statistics.median(f["gpu_ms"] for f in turns), 3),
        )  # fmt: skip


def _child() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--measure", type=json.loads)
    shapes, rounds = parser.parse_args().measure
    import transformer_engine.pytorch  # noqa: F401  (before anything touches CUDA)

    for shape in shapes:
        for level in LEVELS:
            print("\n" + json.dumps({"shape": shape, "level": level, **measure(shape, level, rounds)}), flush=True)


if __name__ == "__main__":
    _child() if "--measure" in sys.argv else main()

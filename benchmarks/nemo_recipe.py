"""NeMo 2's recipe of Llama 3 8B with NeMo's own precision plugin and with this package's: losses, and tokens a second.

    python -m benchmarks.nemo_recipe
    python -m benchmarks.nemo_recipe --small --levels bf16_mixed fp16_mixed --rounds 1  # on a CPU

For an environment of its own, which has NeMo (docs/megatron.rst). ``llm.llama3_8b.pretrain_recipe`` is cut to two
layers, one process and a global batch of four sequences; its learning rate warms up over four steps. Its MockDataModule
draws tokens from the first thousand of the vocabulary, so that the loss can fall. At current scaling no layer stays in
half precision: NeMo's plugin would keep the first and the last one, which are both.

``nemo`` is NeMo's plugin, ``same`` the level with the arguments that make it NeMo's recipe of the name, and ``level``
the level without arguments. Every run is a process of its own. Processes import NeMo side by side, on a machine with
CPUs enough, and train one after the other; rounds repeat that. A figure has the losses of the first round, and the
median over rounds of the median step after the warm-up; ``of_nemo`` is the time of NeMo's plugin over the path's in the
same round, the median of them. Figures of levels and paths that are not measured again stay.
"""

from __future__ import annotations

import json
import os
import statistics
import tempfile
import time
import traceback
from contextlib import ExitStack, nullcontext
from importlib import import_module
from itertools import product
from pathlib import Path
from typing import Any

import fiddle as fdl
import lightning.pytorch as pl
import torch

from benchmarks.record import Record, arguments, earlier, lines
from benchmarks.torch_on_cpu import TorchOnCpu
from benchmarks.turns import in_turns
from nemo_lowprec import recipes

__all__ = ["LEVELS", "PATHS"]

# Levels that NeMo has a recipe of, and the arguments that make the level that recipe.
LEVELS: dict[str, dict[str, Any]] = {
    "bf16_mixed": {},
    "fp16_mixed": {},
    "bf16_with_fp8_mixed": {"fp8_params": True},
    "fp16_with_fp8_mixed": {"fp8_params": True},
    "bf16_with_fp8_current_scaling_mixed": {"fp8_params": True},
    "bf16_with_fp8_subchannel_scaling_mixed": {"fp8": "hybrid"},
}
PATHS = ("nemo", "same", "level")
WARMUP, STEPS, BATCH, WORDS = 5, 20, 4, 1000
_SMALL = {
    "hidden_size": 64, "ffn_hidden_size": 128, "num_attention_heads": 4, "kv_channels": 16, "num_query_groups": 2,
    "vocab_size": 2048, "seq_length": 32,
}  # fmt: skip
_SIZES = {"vocab_size": 128256, "seq_length": 8192}  # the rest is the recipe's own
_ON_CPU = {"apply_rope_fusion": False, "use_cpu_initialization": True, "persist_layer_norm": False,
           "gradient_accumulation_fusion": False, "masked_softmax_fusion": False}  # fmt: skip


class _Words:
    """In the place of a tokenizer, of which MockDataModule wants the number of its tokens."""

    vocab_size = WORDS


class _NemoOnCpu(TorchOnCpu):
    """``TorchOnCpu`` without the random states of a GPU, which dropout alone would draw from."""

    def replaced(self) -> list[tuple[Any, str, Any]]:
        from megatron.core.tensor_parallel.random import CudaRNGStatesTracker

        return [*super().replaced(), (CudaRNGStatesTracker, "fork", lambda tracker: nullcontext())]


class Steps(pl.Callback):
    """Losses and seconds of every step, and the peak of memory."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.seconds: list[float] = []

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, index: int) -> None:
        _wait()
        self._since = time.perf_counter()

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, index: int) -> None:
        _wait()
        self.seconds.append(time.perf_counter() - self._since)
        self.losses.append(round(float(trainer.callback_metrics["reduced_train_loss"]), 6))


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def plugin(level: str, path: str) -> Any:
    """The config of the precision plugin of a level on one of ``PATHS``."""
    if path != "nemo":
        return getattr(recipes, level)(**(LEVELS[level] if path == "same" else {}))
    from nemo.collections.llm.recipes.precision import mixed_precision

    config = getattr(mixed_precision, level)()
    if "current_scaling" in level:
        config.first_last_layers_bf16 = False
    return config


def recipe(level: str, path: str, small: bool, folder: str) -> Any:
    """NeMo's recipe with two layers, ``WARMUP + STEPS`` steps and the plugin of ``path``; it writes to ``folder``."""
    from nemo.collections import llm

    found = llm.llama3_8b.pretrain_recipe(dir=folder, name="recipe", num_nodes=1, num_gpus_per_node=1)
    sizes = _SMALL if small else _SIZES
    on_cpu = {} if torch.cuda.is_available() else _ON_CPU
    for name, value in ({"num_layers": 2} | sizes | on_cpu).items():
        setattr(found.model.config, name, value)
    found.data.seq_length, found.data.global_batch_size = sizes["seq_length"], BATCH
    found.data.tokenizer, found.data.num_workers = _Words(), 0
    trainer = found.trainer
    trainer.plugins, trainer.max_steps = plugin(level, path), WARMUP + STEPS
    trainer.accelerator = "gpu" if torch.cuda.is_available() else "cpu"
    trainer.limit_val_batches = trainer.num_sanity_val_steps = 0
    trainer.enable_checkpointing = trainer.enable_progress_bar = False
    trainer.strategy.context_parallel_size = 1
    found.optim.lr_scheduler.warmup_steps = 4
    found.optim.config.bf16, found.optim.config.fp16 = level.startswith("bf16"), level.startswith("fp16")
    if small:
        found.optim.config.lr = 1e-2  # in a narrow model the recipe's rate does not move the loss in so few steps
    found.log.ckpt = found.log.tensorboard = found.resume = None
    return found


def _add_masks(data: Any) -> None:
    """Give a MockDataModule's batches the causal mask of attention, which NeMo wants without Transformer Engine."""
    dataset = data.train_dataloader().dataset
    dataset.create_attention_mask = True
    dataset.attention_mask = torch.ones(1, data.seq_length, data.seq_length, dtype=torch.bool).triu(1)
    data.setup = lambda stage: None  # it would make the dataset anew


def train(level: str, path: str, small: bool) -> dict[str, Any]:
    """Losses of all steps, the seconds of those after the warm-up, and the peak of memory in GiB."""
    pl.seed_everything(1234)
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        pretrain: Any = fdl.build(recipe(level, path, small, folder))
        if not torch.cuda.is_available():
            _add_masks(pretrain.keywords["data"])
            stack.enter_context(_NemoOnCpu())
        steps = Steps()
        pretrain.keywords["trainer"].callbacks.append(steps)
        pretrain()
    peak = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0
    return {"losses": steps.losses, "seconds": steps.seconds[WARMUP:], "gib": peak / 2**30}


def prepare() -> None:
    """Import NeMo, which takes a minute."""
    import_module("nemo.collections.llm")


def work(level: str, path: str, small: bool, turn: int, out: str) -> None:
    """One process: append what it has trained, or the error, to ``out``."""
    try:
        found = train(level, path, small)
    except Exception as error:
        traceback.print_exc()
        found = {"error": f"{type(error).__name__}: {error}"[:300]}
    with Path(out).open("a") as file:
        file.write(json.dumps({"level": level, "round": turn, "path": path, **found}) + "\n")


def main() -> None:
    parser = arguments(__doc__.split("\n")[0], "nemo_recipe_h200.jsonl")
    parser.add_argument("--levels", nargs="*", choices=LEVELS, default=list(LEVELS))
    parser.add_argument("--paths", nargs="*", choices=PATHS, default=list(PATHS))
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--small", action="store_true", help="two layers of width 64, for a CPU")
    args = parser.parse_args()
    tokens = BATCH * (_SMALL if args.small else _SIZES)["seq_length"]
    with tempfile.NamedTemporaryFile() as file:
        jobs = [
            (level, path, args.small, turn, file.name)
            for level, turn, path in product(args.levels, range(args.rounds), args.paths)
            if path != "same" or LEVELS[level]  # without arguments it is the level itself
        ]
        try:
            in_turns(prepare, work, jobs, ahead=max(1, (os.cpu_count() or 1) // 2))
        finally:
            if runs := lines(Path(file.name)):
                write(args.out, runs, tokens)


def write(out: Path, runs: list[dict[str, Any]], tokens: int) -> None:
    """A figure for every level and path, of steps of ``tokens``, beside those that were not measured again."""
    again = {(f["level"], f["path"]) for f in runs}
    record = Record(out, [f for f in earlier(out, "nemo_recipe") if (f.get("level"), f.get("path")) not in again])
    medians = {(f["level"], f["path"], f["round"]): statistics.median(f["seconds"]) for f in runs if "seconds" in f}
    for level, path in dict.fromkeys((f["level"], f["path"]) for f in runs):
        mine = [f for f in runs if (f["level"], f["path"]) == (level, path)]
        about = {"benchmark": "nemo_recipe", "level": level, "path": path}
        trained = [f for f in mine if "seconds" in f]
        if not trained:
            record.add(**about, error=mine[0]["error"])
            continue
        times = {f["round"]: medians[level, path, f["round"]] for f in trained}
        median = statistics.median(times.values())
        beside = [medians[level, "nemo", r] / s for r, s in times.items() if (level, "nemo", r) in medians]
        record.add(
            **about, ms=round(median * 1e3, 2), ms_min=round(min(times.values()) * 1e3, 2),
            ms_max=round(max(times.values()) * 1e3, 2), rounds=len(times), tokens_per_s=round(tokens / median),
            of_nemo=round(statistics.median(beside), 4) if beside else None,
            peak_gib=round(max(f["gib"] for f in trained), 2), losses=trained[0]["losses"],
        )  # fmt: skip


if __name__ == "__main__":
    main()

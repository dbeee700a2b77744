"""Whole training steps of mixtures of experts: BF16, torchao, Transformer Engine and our levels.

    python -m benchmarks.experts

The models are transformers' own: all of Granite-3.1-1B-A400M, whose step is short, and the layers of Qwen3-30B-A3B (4
of them) and of Mixtral-8x7B (2). A step is forward, loss, backward, the optimizer's step and ``zero_grad``, in a plain
loop. A contestant has a process of its own and the GPU for itself, since two of them do not fit. The BF16 model is
measured before the others, and once more after them; ``x``, ``passes_x`` and ``gpu_x`` compare with the mean of both.
``peak_mib`` is the most memory of a step. ``--columns`` measures the bytes of weights, masters, gradients and
states, which ``Audit`` finds in a step under a Trainer.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import traceback
from typing import Any

import torch
from torch import nn

from benchmarks.columns import bytes_by_column
from benchmarks.everyday import Runner
from benchmarks.everyday_models import SMALL, Batch, Task, loss_of
from benchmarks.experts_contestants import BF16, CONTESTANTS
from benchmarks.measure import DEVICE, MIB, peaks, reset_peak
from benchmarks.record import Record, arguments, lines

BATCH, SEQUENCE, SHORT = 4, 4096, 1024  # on a GPU
_BATCH, _SEQUENCE, _SHORT = (2, 64, 32) if SMALL else (BATCH, SEQUENCE, SHORT)
LEVELS = ("bf16_with_fp8_mixed", "msamp_o2")


def _granite() -> nn.Module:
    from transformers import GraniteMoeConfig, GraniteMoeForCausalLM

    sizes = {"hidden_size": 1024, "intermediate_size": 512, "vocab_size": 49_155, "num_local_experts": 32}
    if SMALL:
        sizes |= {"hidden_size": 64, "intermediate_size": 48, "vocab_size": 512, "num_local_experts": 16}
    return GraniteMoeForCausalLM(
        GraniteMoeConfig(
            **sizes, num_hidden_layers=2 if SMALL else 24, num_attention_heads=16, num_key_value_heads=8,
            num_experts_per_tok=8, embedding_multiplier=12.0, attention_multiplier=0.015625, logits_scaling=6.0,
            residual_multiplier=0.22, max_position_embeddings=_SEQUENCE, use_cache=False, attn_implementation="sdpa",
            tie_word_embeddings=True,
        )
    )  # fmt: skip


def _qwen3() -> nn.Module:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    sizes = {"hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768, "vocab_size": 151_936}
    sizes |= {"num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "num_experts": 128}
    if SMALL:
        sizes |= {"hidden_size": 64, "moe_intermediate_size": 48, "vocab_size": 512, "num_experts": 16, "head_dim": 16}
    return Qwen3MoeForCausalLM(
        Qwen3MoeConfig(
            **sizes, num_hidden_layers=4, num_experts_per_tok=8, norm_topk_prob=True, max_position_embeddings=_SEQUENCE,
            use_cache=False, attn_implementation="sdpa", tie_word_embeddings=False,
        )
    )  # fmt: skip


def _mixtral() -> nn.Module:
    from transformers import MixtralConfig, MixtralForCausalLM

    sizes = {"hidden_size": 4096, "intermediate_size": 14336, "vocab_size": 32_000}
    sizes |= {"hidden_size": 128, "intermediate_size": 192, "vocab_size": 512} if SMALL else {}
    return MixtralForCausalLM(
        MixtralConfig(
            **sizes, num_hidden_layers=2, num_attention_heads=32, num_key_value_heads=8, num_local_experts=8,
            num_experts_per_tok=2, max_position_embeddings=_SEQUENCE, use_cache=False, attn_implementation="sdpa",
            tie_word_embeddings=False,
        )
    )  # fmt: skip


def _tokens(vocabulary: int, sequence: int = _SEQUENCE) -> Batch:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(vocabulary, (_BATCH, sequence + 1), generator=generator).to(DEVICE)
    return Batch({"input_ids": tokens[:, :-1].contiguous()}, tokens[:, 1:].contiguous())


MODELS = {
    "Granite-3.1-1B-A400M": Task(_granite, lambda: _tokens(512 if SMALL else 49_155, _SHORT)),
    "Qwen3-30B-A3B, 4 layers": Task(_qwen3, lambda: _tokens(512 if SMALL else 151_936)),
    "Mixtral-8x7B, 2 layers": Task(_mixtral, lambda: _tokens(512 if SMALL else 32_000)),
}


def measure(model: str, name: str, rounds: int, steps: int) -> dict[str, Any]:
    """The figures of a contestant."""
    task = MODELS[model]
    try:
        runner = Runner(CONTESTANTS[name], task, task.batch())
        reset_peak()
        for _ in range(rounds):
            runner.round(steps)
        peak = peaks()[0]
        gpu = runner.gpu()
        return {
            "name": name, "ms": round(statistics.median(runner.rounds), 3), "ms_min": round(min(runner.rounds), 3),
            "ms_max": round(max(runner.rounds), 3), "rounds": rounds, "steps": steps,
            "passes_ms": round(statistics.median(runner.passes), 3), "peak_mib": round(peak / MIB), **gpu,
            **runner.of_setup(),
        }  # fmt: skip
    except Exception as error:
        traceback.print_exception(error)
        return {"name": name, "error": f"{type(error).__name__}: {error}"[:300]}


def measure_columns(model: str, level: str) -> dict[str, Any]:
    """The bytes of a level, by column."""
    import lightning.pytorch as pl

    class Alone(pl.LightningModule):
        def __init__(self, task: Task) -> None:
            super().__init__()
            with DEVICE:
                self.model = task.model()
            self.batch = task.batch()

        def train_dataloader(self) -> list[int]:
            return [0, 1]

        def training_step(self, batch: int) -> torch.Tensor:
            return loss_of(self.model, self.batch)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=1e-5, fused=DEVICE.type == "cuda")

    return {"name": level, **bytes_by_column(Alone(MODELS[model]), level)}


def in_a_process(model: str, name: str, args: argparse.Namespace) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.experts", "--rounds", str(args.rounds), "--steps", str(args.steps)]
    command += ["--columns"] if args.columns else []
    done = subprocess.run([*command, "--one", model, name], stdout=subprocess.PIPE, text=True, check=False)
    found = [line for line in done.stdout.splitlines() if line.startswith('{"name"')]
    for line in done.stdout.splitlines():
        if line not in found:
            print(line, flush=True)
    return json.loads(found[-1]) if found else {"name": name, "error": f"the process ended with {done.returncode}"}  # type: ignore[no-any-return]


def main() -> None:
    parser = arguments(__doc__.split("\n")[0], "experts_h200.jsonl")
    parser.add_argument("--models", nargs="*", help="models whose name holds one of these")
    parser.add_argument("--contestants", nargs="*", help="contestants whose names hold one of these")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=4, help="steps of a round")
    parser.add_argument("--continue", dest="go_on", action="store_true", help="keep the figures that are there")
    parser.add_argument("--columns", action="store_true", help="bytes by column, of the levels alone")
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print(json.dumps(measure_columns(*args.one) if args.columns else measure(*args.one, args.rounds, args.steps)))
        return
    chosen = [n for n in CONTESTANTS if not args.contestants or any(part in n for part in args.contestants)]
    kept = [line for line in lines(args.out) if "error" not in line] if args.go_on and args.out.exists() else []
    record = Record(args.out, kept)
    for model in MODELS:
        if args.models and not any(part in model for part in args.models):
            continue
        if args.columns:
            for level in LEVELS:
                record.add(benchmark="experts_bytes", model=model, **in_a_process(model, level, args))
            continue
        first = in_a_process(model, BF16, args)
        others = [in_a_process(model, name, args) for name in chosen if name != BF16]
        last = in_a_process(model, BF16, args)
        beside = {
            key: (first[key] + last[key]) / 2 if first.get(key) and last.get(key) else None
            for key in ("ms", "passes_ms", "gpu_ms")
        }
        for figure in (first, *others, last):
            ratios = {
                into: round(beside[key] / figure[key], 3)
                for into, key in (("x", "ms"), ("passes_x", "passes_ms"), ("gpu_x", "gpu_ms"))
                if figure.get(key) and beside[key]
            }
            record.add(benchmark="experts", model=model, **figure, **ratios)


if __name__ == "__main__":
    main()

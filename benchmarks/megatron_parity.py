"""Loss parity of Megatron-core's layouts: the same Llama, data and seed on each, and on transformers' path.

    python -m benchmarks.megatron_parity --source FOLDER_OF_TEXT

About 100M parameters, 16k tokens a step, 200 steps, on two GPUs, no sequence twice. Runs of a seed start from the same
weights, which a transformers model has written, and all see the same samples in each step; layouts train side by side,
as their time is not what is measured. ``furthest`` is the largest distance of a run's smoothed training loss (mean of
ten steps) from that of transformers' path, and ``furthest_from_fused`` from that of "transformers, fused", at the same
level and seed; ``skipped`` are the steps whose gradients were not finite. Fused, transformers' model has one matrix
for queries, keys and values and one for SwiGLU's two, as Megatron-core's layers have, and so their FP8 scales; on two
GPUs it shows how far it comes from itself. The head has weights of its own: tied to the embedding of another pipeline
stage, FP8 gradients are refused. Figures of levels, layouts and seeds that are not trained again stay.
"""

from __future__ import annotations

import json
import tempfile
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist

from benchmarks.fused_llama import fused_llama
from benchmarks.measure import release
from benchmarks.megatron_model import on_gpus, plugin
from benchmarks.record import Record, arguments, earlier, lines
from nemo_lowprec.data import TextDataModule, prepare_data
from nemo_lowprec.models import CausalLM
from nemo_lowprec.models.megatron_gpt import MegatronGPT
from nemo_lowprec.strategies import MegatronStrategy

SEQUENCE, BATCH, MICRO, VALIDATION = 1024, 16, 8, 64  # samples: whole batches on one and on two processes
LAYOUTS: dict[str, tuple[int, dict[str, int]]] = {
    "transformers": (1, {}),
    "transformers, DP2": (2, {}),
    "transformers, fused": (1, {}),
    "TP1": (1, {}),
    "TP2": (2, {"tensor_model_parallel_size": 2}),
    "PP2": (2, {"pipeline_model_parallel_size": 2}),
    "DP2": (2, {}),
}
LEVELS = ["bf16_mixed", "bf16_with_fp8_mixed", "msamp_o2+fp16"]
MODEL: dict[str, Any] = {
    "preset": "llama_100m", "config": {"tie_word_embeddings": False}, "lr": 3e-4, "min_lr": 3e-5, "warmup_steps": 50,
}  # fmt: skip


class Curve(pl.Callback):
    """The loss of each step, the mean over its micro-batches and data-parallel processes; and which were skipped."""

    def __init__(self) -> None:
        self.losses: list[torch.Tensor] = []
        self.skipped: list[int] = []
        self._micro: list[torch.Tensor] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, index: int) -> None:
        loss = outputs["loss"].detach().clone()
        whole = isinstance(module, MegatronGPT)  # whose losses are those of all processes
        if not whole and trainer.world_size > 1:
            dist.all_reduce(loss, dist.ReduceOp.AVG)
        self._micro.append(loss)
        if len(self._micro) == trainer.accumulate_grad_batches:
            # Lightning divides each by their number; the last one of a pipeline stands for all.
            self.losses.append(self._micro[-1] * len(self._micro) if whole else torch.stack(self._micro).sum())
            self._micro = []
            on_megatron = isinstance(trainer.strategy, MegatronStrategy)
            engine = trainer.strategy.engine.guard if on_megatron else trainer.precision_plugin.engine.step
            if engine.skipped:
                self.skipped.append(len(self.losses) - 1)


def train(level: str, layout: str, seed: int, steps: int, folder: str) -> dict[str, Any]:
    world, sizes = LAYOUTS[layout]
    ways = world // max(1, *sizes.values(), 1)
    data = TextDataModule(
        train_prefix=f"{folder}/train", validation_prefix=f"{folder}/validation", seq_length=SEQUENCE,
        micro_batch_size=MICRO, seed=0, validation_samples=VALIDATION,
    )  # fmt: skip
    if layout.startswith("transformers"):
        model, strategy = untrained(seed, folder), "auto" if world == 1 else "lowprec_ddp"
        if layout == "transformers, fused":
            model.model = fused_llama(model.model)
    else:
        model = MegatronGPT(**MODEL, vocab_size=data_vocab(folder), weights=weights_of(seed, folder))
        strategy = MegatronStrategy(**sizes)
    curve = Curve()
    trainer = pl.Trainer(
        accelerator="gpu", devices=world, strategy=strategy, max_steps=steps, plugins=plugin(level), callbacks=[curve],
        accumulate_grad_batches=BATCH // MICRO // ways, gradient_clip_val=1.0, logger=False, limit_val_batches=1.0,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, num_sanity_val_steps=0,
        use_distributed_sampler=False, val_check_interval=steps * (BATCH // MICRO // ways),
        check_val_every_n_epoch=None,
    )  # fmt: skip
    trainer.fit(model, datamodule=data)
    return {
        "val_loss": float(trainer.callback_metrics["val/loss"]),
        "skipped": curve.skipped,
        "train_loss": [round(x, 4) for x in torch.stack(curve.losses).float().tolist()],
    }


def data_vocab(folder: str) -> int:
    """Ids of the tokenizer of the prepared data."""
    return json.loads(Path(folder, "vocab.json").read_text())


def untrained(seed: int, folder: str) -> CausalLM:
    """The model, with weights from the CPU's random numbers: they are the same wherever it is made."""
    model = CausalLM(**MODEL, init_seed=seed, vocab_size=data_vocab(folder))
    model.configure_model()
    return model


def weights_of(seed: int, folder: str) -> str:
    """Where those weights are saved."""
    return f"{folder}/weights_{seed}"


def work(
    rank: int, gpus: int, layout: str, levels: list[str], seeds: list[int], steps: int, folder: str, out: str
) -> None:
    for seed, level in product(seeds, levels):
        release()
        found = train(level, layout, seed, steps, folder)
        if rank == 0:
            with Path(out).open("a") as file:
                file.write(json.dumps({"level": level, "layout": layout, "init_seed": seed, **found}) + "\n")


def train_all(layouts: list[str], *args: Any) -> None:
    """Run ``work`` for each layout, all side by side; those of one GPU are dealt out over the GPUs."""
    alone = [layout for layout in layouts if LAYOUTS[layout][0] == 1]
    count = torch.cuda.device_count()
    with ThreadPoolExecutor(len(layouts)) as pool:
        jobs = [pool.submit(on_gpus, 1, work, layout, *args, first=i % count) for i, layout in enumerate(alone)]
        jobs += [
            pool.submit(on_gpus, LAYOUTS[layout][0], work, layout, *args) for layout in layouts if layout not in alone
        ]
        for job in jobs:
            job.result()


def smoothed(losses: list[float]) -> list[float]:
    return [sum(losses[i : i + 10]) / 10 for i in range(0, len(losses) - 9, 10)]


def main() -> None:
    parser = arguments(__doc__.split("\n")[0], "megatron_parity_h200.jsonl")
    parser.add_argument("--levels", nargs="*", default=LEVELS)
    parser.add_argument("--layouts", nargs="*", default=list(LAYOUTS), choices=list(LAYOUTS))
    parser.add_argument("--seeds", nargs="*", type=int, default=[0], help="of the initial weights")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--source", help="folder of text; the standard library's sources without")
    parser.add_argument("--max-bytes", type=int, default=24_000_000)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        prepare_data(folder, args.source, vocab_size=8192, max_bytes=args.max_bytes)
        module = TextDataModule(
            train_prefix=f"{folder}/train", validation_prefix=f"{folder}/validation", seq_length=SEQUENCE,
            micro_batch_size=1,
        )  # fmt: skip
        samples, validation = len(module.train_dataloader()), len(module.val_dataloader())
        if samples < args.steps * BATCH or validation < VALIDATION:
            parser.error(
                f"{args.steps} steps take {args.steps * BATCH} samples, and validation {VALIDATION}: the text makes "
                f"{samples} and {validation}. Pass a --source with more, or larger --max-bytes."
            )
        Path(folder, "vocab.json").write_text(json.dumps(module.vocab_size))
        for seed in args.seeds:
            first = untrained(seed, folder).model
            assert first is not None
            first.save_pretrained(weights_of(seed, folder))
        out = Path(folder, "runs.jsonl")
        try:
            train_all(args.layouts, args.levels, args.seeds, args.steps, folder, str(out))
        finally:
            if out.exists():
                write(args.out, lines(out), args.steps)


def write(out: Path, runs: list[dict[str, Any]], steps: int) -> None:
    """A figure for every level, layout and seed, those of earlier runs among them."""
    about = {"benchmark": "megatron_parity", "steps": steps, "tokens_per_step": SEQUENCE * BATCH}
    new = [{**about, "gpus": LAYOUTS[run["layout"]][0], **run} for run in runs]
    again = {run_of(f) for f in new}
    kept = [line for line in earlier(out, "megatron_parity") if "level" not in line or run_of(line) not in again]
    figures = [line for line in [*kept, *new] if "level" in line]
    losses = {run_of(f): smoothed(f["train_loss"]) for f in figures}
    for figure in figures:
        level, layout, seed = run_of(figure)
        for name, other in (("furthest", "transformers"), ("furthest_from_fused", "transformers, fused")):
            if (level, other, seed) in losses:
                pairs = zip(losses[level, layout, seed], losses[level, other, seed], strict=True)
                figure[name] = round(max(abs(a - b) for a, b in pairs), 4)
    record = Record(out, kept)
    for figure in new:
        record.add(**figure)


def run_of(figure: dict[str, Any]) -> tuple[str, str, int]:
    """(level, layout, seed)."""
    return figure["level"], figure["layout"], figure["init_seed"]


if __name__ == "__main__":
    main()

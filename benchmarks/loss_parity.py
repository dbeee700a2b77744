"""Loss parity: a Llama of about 100M parameters on real text, at each level and several seeds.

    python -m benchmarks.loss_parity --source FOLDER_OF_TEXT
    python -m benchmarks.loss_parity --levels bf16_mixed msamp_o2 msamp_o2@lowprec_sharded --out PARALLEL.jsonl

``LEVEL@STRATEGY`` trains on all GPUs of the machine, on the same samples in each step as one GPU would.

Every run has its own process; runs of one seed share weights and the order of the data, so the gap to bf16_mixed is
taken seed by seed. Results already in the file of results are kept, each after its own origin, so that a
series can be run in parts.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from benchmarks.levels import HOPPER
from benchmarks.record import Record, arguments, earlier

SEQUENCE, BATCH, EVERY = 1024, 16, 20
BASELINE = "bf16_mixed"
# A level may be followed by options: ``msamp_o2+stochastic_rounding``. These stand for more than "is True".
VARIANTS = {
    "fp8_head": {"head": "fp8"}, "fp8_activations": {"activations": "fp8", "graphs": True},
    "no_graphs": {"graphs": False},
}  # fmt: skip


def train(level: str, seed: int, steps: int, data_dir: str, out: Path) -> None:
    """One run: writes its validation loss and its loss curve."""
    import lightning.pytorch as pl

    import nemo_lowprec
    from nemo_lowprec.data import TextDataModule
    from nemo_lowprec.models import CausalLM

    class Curve(pl.Callback):
        def __init__(self) -> None:
            self.losses: list[torch.Tensor] = []

        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, index: int) -> None:
            if trainer.global_step % EVERY == 0:
                self.losses.append(outputs["loss"].detach().clone())

    pl.seed_everything(seed)
    curve = Curve()
    row, _, strategy = level.partition("@")
    world = int(os.environ["WORLD_SIZE"]) if strategy else 1
    processes = {"strategy": strategy, "use_distributed_sampler": False} if strategy else {}
    name, *variants = row.split("+")
    converts = {"convert": None} if nemo_lowprec.CHART[name].has_fp8 else {}  # whatever is faster
    options = converts | {k: v for variant in variants for k, v in VARIANTS.get(variant, {variant: True}).items()}
    plugin = getattr(nemo_lowprec, name)(**options)
    trainer = pl.Trainer(
        accelerator="auto", devices=world, max_steps=steps, plugins=plugin, callbacks=[curve], logger=False,
        gradient_clip_val=1.0, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        num_sanity_val_steps=0, limit_val_batches=0, **processes,
    )  # fmt: skip
    model = CausalLM(preset="llama_100m", lr=6e-4, min_lr=6e-5, warmup_steps=100, init_seed=seed)
    data = TextDataModule(
        train_prefix=f"{data_dir}/train", validation_prefix=f"{data_dir}/validation", seq_length=SEQUENCE,
        micro_batch_size=BATCH // world, seed=seed, num_workers=2, validation_samples=1024,
    )  # fmt: skip
    start = time.perf_counter()
    trainer.fit(model, datamodule=data)
    seconds = time.perf_counter() - start
    trainer.limit_val_batches = 1.0
    (metrics,) = trainer.validate(model, datamodule=data, verbose=False)
    backend = plugin.engine.columns.computation.backend
    result = {
        "benchmark": "loss_parity",
        "level": level,
        "seed": seed,
        "steps": steps,
        "gpus": world,
        "tokens_per_step": SEQUENCE * BATCH,
        "parameters": sum(p.numel() for p in model.parameters()),
        "val_loss": metrics["val/loss"],
        "backend": backend.name if backend is not None and plugin.level.has_fp8 else None,
        "seconds": round(seconds, 1),
        "train_loss": [round(x, 4) for x in torch.stack(curve.losses).float().tolist()],
        "every": EVERY,
    }
    if trainer.is_global_zero:
        out.write_text(json.dumps(result))


def summarize(record: Record, runs: list[dict[str, Any]]) -> None:
    """Gap to the baseline by level, with the spread over seeds beside it."""
    losses: dict[str, dict[int, float]] = {}
    for run in runs:
        losses.setdefault(run["level"], {})[run["seed"]] = run["val_loss"]
    base = losses.get(BASELINE, {})
    for level, by_seed in losses.items():
        values = list(by_seed.values())
        shared = [s for s in by_seed if s in base]
        gaps = [(by_seed[s] / base[s] - 1) * 100 for s in shared]
        record.add(
            benchmark="loss_parity_summary", level=level, seeds=len(values), val_loss_mean=statistics.mean(values),
            seed_spread=max(values) - min(values),
            seed_spread_percent=(max(values) - min(values)) / statistics.mean(values) * 100,
            gap_percent_mean=statistics.mean(gaps) if gaps else None, gap_percent=gaps,
        )  # fmt: skip


def main() -> None:
    levels = [*HOPPER, "msamp_o2+stochastic_rounding", "msamp_o3+stochastic_rounding", "msamp_o2+fp8_head"]
    levels += ["bf16_with_fp8_mixed+fp8_params"]
    parser = arguments(__doc__.split("\n")[0], "loss_parity_h200.jsonl")
    parser.add_argument("--levels", nargs="*", default=levels)
    parser.add_argument("--seeds", nargs="*", type=int, default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--source", help="folder of text; the standard library's sources without")
    parser.add_argument("--max-bytes", type=int, default=120_000_000)
    parser.add_argument("--jobs", type=int, default=4, help="runs at the same time, spread over the GPUs")
    parser.add_argument("--time-limit", type=float, default=float("inf"), help="start no run after so many seconds")
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        level, seed, data_dir = args.one
        train(level, int(seed), args.steps, data_dir, args.out)
        return

    start = time.monotonic()
    kept = earlier(args.out, "loss_parity")
    runs = [line for line in kept if "command" not in line]
    have = {(r["level"], r["seed"]) for r in runs}
    record = Record(args.out, kept)
    with tempfile.TemporaryDirectory() as folder:
        from nemo_lowprec.data import prepare_data

        data_dir = f"{folder}/data"
        prepare_data(data_dir, args.source, vocab_size=16384, max_bytes=args.max_bytes)

        gpus: queue.Queue[int] = queue.Queue()
        for i in range(args.jobs):
            gpus.put(i % max(1, torch.cuda.device_count()))

        def one(job: tuple[str, int]) -> None:
            level, seed = job
            if time.monotonic() - start > args.time_limit:
                print(f"not started for lack of time: {level}, seed {seed}", flush=True)
                return
            out = Path(folder) / f"{level}-{seed}.json"
            command = ["benchmarks.loss_parity", "--steps", str(args.steps), "--out", str(out)]
            gpu = gpus.get()
            visible = str(gpu)
            if "@" in level:
                count = torch.cuda.device_count()
                visible = ",".join(map(str, range(count)))
                command = ["torch.distributed.run", "--standalone", f"--nproc-per-node={count}", "-m", *command]
            result = subprocess.run(
                [sys.executable, "-m", *command, "--one", level, str(seed), data_dir],
                capture_output=True,
                text=True,
                env={**os.environ, "CUDA_VISIBLE_DEVICES": visible},
            )
            gpus.put(gpu)
            if out.exists():
                runs.append(json.loads(out.read_text()))
                record.add(**runs[-1])
            else:
                print(result.stdout[-1500:], result.stderr[-3000:], flush=True)
                record.add(benchmark="loss_parity_failure", level=level, seed=seed, error=result.stderr[-300:])

        jobs = [(level, seed) for seed in args.seeds for level in args.levels if (level, seed) not in have]
        with ThreadPoolExecutor(args.jobs) as pool:
            list(pool.map(one, jobs))
    if runs:
        runs.sort(key=lambda r: (r["seed"], args.levels.index(r["level"]) if r["level"] in args.levels else 99))
        summarize(record, runs)


if __name__ == "__main__":
    main()

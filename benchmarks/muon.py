"""Muon, Lion and SGD with low-bit states: bytes a parameter, the step's time, and the loss beside torch's Muon in FP32.

    python -m benchmarks.muon --source FOLDER_OF_TEXT
    python -m benchmarks.muon --parts parity --steps 1000 --seeds 0 1 2

Bytes are those that ``Audit`` finds of weights, gradients and states in a step of a Llama of 1.1 B parameters. Times
are of the step alone, over the tensors of ``optimizer_step``. Losses are those of a Llama of 100 M parameters on text,
in loops that share weights and data seed by seed: msamp_o2 with this package's Muon, and FP32 weights under autocast
to BF16 with torch's Muon and AdamW.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from itertools import chain, repeat
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from benchmarks.columns import bytes_by_column
from benchmarks.measure import DEVICE, release
from benchmarks.optimizer_step import Contestant, measure, shapes
from benchmarks.record import Record, arguments
from nemo_lowprec.optim import SGD, Lion, Muon

PARTS = ("bytes", "time", "parity")
BASELINE, OURS = "torch Muon + AdamW, FP32", "nemo_lowprec Muon, msamp_o2"
LLAMA = {
    "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 22, "num_attention_heads": 32,
    "num_key_value_heads": 4,
}  # fmt: skip
SEQUENCE, BATCH = 512, 16
SETTINGS: dict[str, Any] = {"lr": 1e-3, "weight_decay": 0.1, "adjust_lr_fn": "match_rms_adamw"}
ADAMW: dict[str, Any] = {"lr": 1e-3, "weight_decay": 0.1, "betas": (0.9, 0.95)}


class Both:
    """torch's Muon for matrices and AdamW for the rest, as one optimizer."""

    def __init__(self, groups: list[dict[str, Any]]) -> None:
        fused = DEVICE.type == "cuda"
        others = [{k: v for k, v in group.items() if k != "use_muon"} for group in groups[1:]]
        self.muon = torch.optim.Muon(groups[0]["params"], **SETTINGS)
        self.adamw = torch.optim.AdamW(others, fused=fused, **ADAMW)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return [*self.muon.param_groups, *self.adamw.param_groups]

    @property
    def state(self) -> dict[Tensor, Any]:
        return {**self.muon.state, **self.adamw.state}

    def step(self) -> None:
        self.muon.step()
        self.adamw.step()

    def zero_grad(self) -> None:
        self.muon.zero_grad()
        self.adamw.zero_grad()


# Bytes


def measure_bytes(record: Record, config: dict[str, int]) -> None:
    """Train two steps with each optimizer, and add up what the audit of the second one finds."""
    from nemo_lowprec.models import CausalLM

    class Random(CausalLM):
        def train_dataloader(self) -> DataLoader:
            ids = torch.randint(32_000, (1, 257), generator=torch.Generator().manual_seed(0))
            return DataLoader([{"input_ids": ids[:, :-1], "labels": ids[:, 1:]}] * 2, batch_size=None)

    for states in ("fp8+fp16", "fp8+fp8"):
        for optimizer in ("adamw", "muon", "lion", "sgd"):
            model = Random(model_type="llama", config=config, vocab_size=32_000, optimizer=optimizer)
            found = bytes_by_column(model, "msamp_o2", states=states)
            record.add(benchmark="muon_bytes", optimizer=optimizer, states=states, **found)
            del model
            release()


# Time of a step


def contestants() -> dict[str, Contestant]:
    """This package's optimizers with O2's formats beside torch's in FP32."""

    def groups(params: list[nn.Parameter]) -> list[dict[str, Any]]:
        hidden = [p for p in params[1:-1] if p.dim() > 1]
        rest = [params[0], params[-1], *(p for p in params if p.dim() < 2)]
        return [{"params": hidden}, {"params": rest, "use_muon": False}]

    def of(make: Callable[..., Any], low: bool) -> Contestant:
        return Contestant(torch.float16 if low else torch.float32, make, fp8_gradients=low)

    fused: dict[str, Any] = {"fused": True} if DEVICE.type == "cuda" else {"foreach": True}
    low: dict[str, Any] = {"exp_avg_dtype": "fp8"}
    return {
        BASELINE: of(lambda p: Both(groups(p)), False),
        "nemo_lowprec Muon, FP32": of(lambda p: Muon(groups(p), **SETTINGS), False),
        "nemo_lowprec Muon, O2": of(lambda p: Muon(groups(p), **SETTINGS, **low, exp_avg_sq_dtype="fp16"), True),
        "torch SGD fused, FP32": of(lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, **fused), False),
        "nemo_lowprec SGD, O2": of(lambda p: SGD(p, 0.1, momentum=0.9), True),
        "nemo_lowprec Lion, FP32": of(lambda p: Lion(p, 1e-4, weight_decay=0.1), False),
        "nemo_lowprec Lion, O2": of(lambda p: Lion(p, 1e-4, weight_decay=0.1, **low), True),
    }


def measure_time(record: Record, of: list[tuple[int, ...]], rounds: int) -> None:
    count = sum(torch.Size(shape).numel() for shape in of)
    field = contestants()
    found: dict[str, list[dict[str, float]]] = {name: [] for name in field}
    for _ in range(rounds):
        for name, contestant in field.items():
            found[name].append(measure(contestant, of))
            release()
    for name, figures in found.items():
        ms = [one["ms"] for one in figures]
        record.add(
            benchmark="muon_step", name=name, parameters=count, ms=round(statistics.median(ms), 3),
            ms_min=round(min(ms), 3), ms_max=round(max(ms), 3), rounds=rounds,
            host_ms=round(statistics.median(one["host_ms"] for one in figures), 3),
            state_bytes_per_param=round(figures[-1]["state"] / count, 4),
            temporaries_bytes_per_param=round(max(one["temporaries"] for one in figures) / count, 4),
        )  # fmt: skip


# Loss


def train(name: str, seed: int, steps: int, data: Any, preset: str, warmup: int) -> dict[str, Any]:
    """One run in a plain loop; its validation loss."""
    import nemo_lowprec
    from nemo_lowprec.models import CausalLM, muon_groups
    from nemo_lowprec.models.loss import summed_cross_entropy
    from nemo_lowprec.models.optimizer import warmup_cosine

    model = CausalLM(preset=preset, vocab_size=data.vocab_size, init_seed=seed)
    model.configure_model()
    model.to(DEVICE)
    optimizer: Any = None
    if name == OURS:
        adamw = {f"adamw_{key}": value for key, value in ADAMW.items()}
        backend = {} if DEVICE.type == "cuda" else {"backend": "reference"}
        optimizer = Muon(muon_groups(model), **SETTINGS, **adamw)
        nemo_lowprec.prepare(model, optimizer, level="msamp_o2", convert=None, **backend)
    else:
        optimizer = Both(muon_groups(model))
    rates = [group["lr"] for group in optimizer.param_groups]
    factor = warmup_cosine(warmup, steps, 0.1)

    def loss_of(batch: dict[str, Tensor]) -> Tensor:
        batch = {key: value.to(DEVICE, non_blocking=True) for key, value in batch.items()}
        with torch.autocast(DEVICE.type, torch.bfloat16):
            return summed_cross_entropy(model(batch["input_ids"]), batch["labels"]) / batch["labels"].numel()

    batches = chain.from_iterable(repeat(data.train_dataloader()))
    losses = []
    start = time.perf_counter()
    for step in range(steps):
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate * factor(step)
        optimizer.zero_grad()
        loss = loss_of(next(batches))
        loss.backward()
        nemo_lowprec.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 20 == 0:
            losses.append(loss.detach())
    seconds = time.perf_counter() - start
    model.eval()
    with torch.no_grad():
        found = torch.stack([loss_of(batch) for batch in data.val_dataloader()])
    return {
        "name": name, "seed": seed, "steps": steps, "tokens_per_step": data.seq_length * data.micro_batch_size,
        "parameters": sum(p.numel() for p in model.parameters()), "val_loss": float(found.mean()),
        "seconds": round(seconds, 1), "train_loss": [round(float(one), 4) for one in losses],
    }  # fmt: skip


def measure_parity(record: Record, args: Any) -> None:
    from nemo_lowprec.data import TextDataModule, prepare_data

    with tempfile.TemporaryDirectory() as folder:
        data_dir = f"{folder}/data"
        prepare_data(data_dir, args.source, vocab_size=args.vocab_size, max_bytes=args.max_bytes)
        found: dict[str, dict[int, float]] = {BASELINE: {}, OURS: {}}
        for seed in args.seeds:
            for name, by_seed in found.items():
                data = TextDataModule(
                    train_prefix=f"{data_dir}/train", validation_prefix=f"{data_dir}/validation",
                    seq_length=args.sequence, micro_batch_size=args.batch, seed=seed, num_workers=0,
                    validation_samples=args.validation_samples,
                )  # fmt: skip
                data.setup()
                one = train(name, seed, args.steps, data, args.preset, min(100, args.steps // 10))
                by_seed[seed] = one["val_loss"]
                record.add(benchmark="muon_parity", **one)
                release()
    for name, by_seed in found.items():
        gaps = [(by_seed[seed] / found[BASELINE][seed] - 1) * 100 for seed in by_seed]
        values = list(by_seed.values())
        record.add(
            benchmark="muon_parity_summary", name=name, seeds=len(values), val_loss_mean=statistics.mean(values),
            seed_spread_percent=(max(values) - min(values)) / statistics.mean(values) * 100,
            gap_percent_mean=statistics.mean(gaps), gap_percent=gaps,
        )  # fmt: skip


def main() -> None:
    parser = arguments(__doc__.split("\n")[0], "muon_h200.jsonl")
    parser.add_argument("--parts", nargs="*", default=list(PARTS), choices=PARTS)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--layers", type=int, default=16, help="of the tensors whose step is timed")
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--vocab", type=int, default=32_768)
    parser.add_argument("--config", nargs="*", default=[], help="NAME=NUMBER of the model whose bytes are counted")
    parser.add_argument("--seeds", nargs="*", type=int, default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--preset", default="llama_100m")
    parser.add_argument("--sequence", type=int, default=SEQUENCE)
    parser.add_argument("--batch", type=int, default=BATCH)
    parser.add_argument("--validation-samples", type=int, default=512)
    parser.add_argument("--source", help="folder of text; the standard library's sources without")
    parser.add_argument("--vocab-size", type=int, default=16_384)
    parser.add_argument("--max-bytes", type=int, default=40_000_000)
    args = parser.parse_args()
    record = Record(args.out)
    if "bytes" in args.parts:
        changed = {name: int(value) for name, _, value in (one.partition("=") for one in args.config)}
        measure_bytes(record, {**LLAMA, **changed})
    if "time" in args.parts:
        measure_time(record, shapes(args.layers, args.hidden, args.vocab), args.rounds)
    if "parity" in args.parts:
        measure_parity(record, args)


if __name__ == "__main__":
    main()

"""The optimizer's step over 1.107 B parameters, as the tensors of a Llama of 1B's layers: ours beside the others.

    python -m benchmarks.optimizer_step

A round builds a contestant and times ``STEPS`` steps between two CUDA events; the rounds of all contestants take
turns. ``bytes`` is what a step must move: gradients read, states and masters read and written, weights written, and
read where there is no master. (An FP8 weight whose scale changes is written a second time: that is not counted.)
Temporaries are the peak within a step above what was there before it.
"""

from __future__ import annotations

import statistics
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.measure import DEVICE, allocated, peaks, release, reset_peak, sizes, synchronize
from benchmarks.record import Record, arguments
from nemo_lowprec.formats import E4M3, FP16
from nemo_lowprec.tensors import BlockScaledTensor, Fp8Weight, GradientTensor
from nemo_lowprec.weights import master_of

WARMUP, STEPS = 3, 10
SETTINGS: dict[str, Any] = {"lr": 1e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}


def shapes(layers: int, hidden: int, vocab: int) -> list[tuple[int, ...]]:
    """Of every parameter, in the model's order; 8 of 32 heads have keys, embedding and head are not tied."""
    keys, ffn = hidden // 4, 4 * hidden
    layer = [(hidden, hidden), (keys, hidden), (keys, hidden), (hidden, hidden)]  # q, k, v, o
    layer += [(ffn, hidden), (ffn, hidden), (hidden, ffn), (hidden,), (hidden,)]  # gate, up, down, norms
    return [(vocab, hidden), *(layer * layers), (hidden,), (vocab, hidden)]


@dataclass(frozen=True)
class Contestant:
    """An optimizer, the dtype of its weights (and of its gradients, unless these are in FP8) and its masters.

    With ``fp8_weights`` the layers' matrices are in E4M3 with FP16 masters, and only what else there is in ``weights``.
    """

    weights: torch.dtype
    make: Callable[[list[nn.Parameter]], torch.optim.Optimizer]
    fp8_gradients: bool = False
    masters: bool = False
    fp8_weights: bool = False

    def parameters(self, of: list[tuple[int, ...]]) -> list[nn.Parameter]:
        torch.manual_seed(0)
        params = []
        for index, shape in enumerate(of):
            values = torch.randn(shape, device=DEVICE) * 0.02
            inner = len(shape) > 1 and 0 < index < len(of) - 1
            if self.fp8_weights and inner:
                master = BlockScaledTensor.from_float(values, FP16)
                param = nn.Parameter(Fp8Weight.from_float(master.dequantize(), E4M3, torch.bfloat16, power_of_two=True))
                param.master_weight = master  # type: ignore[attr-defined]
            else:
                param = nn.Parameter(values.to(self.weights))
            grad: Tensor = torch.randn(shape, device=DEVICE) * 1e-3
            if self.fp8_gradients:
                param.grad_dtype = None
            param.grad = GradientTensor.from_float(grad) if self.fp8_gradients else grad.to(self.weights)
            params.append(param)
        return params


def contestants() -> dict[str, Contestant]:
    fp32, fp16, bf16, uint8 = torch.float32, torch.float16, torch.bfloat16, torch.uint8

    def stock(params: list[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(params, fused=True, **SETTINGS)

    def ours(exp_avg: str, exp_avg_sq: str, fp8_weights: bool = False, rounding: bool = False) -> Contestant:
        def make(params: list[nn.Parameter]) -> torch.optim.Optimizer:
            from nemo_lowprec.optim import AdamW

            dtypes: dict[str, Any] = {"exp_avg_dtype": exp_avg, "exp_avg_sq_dtype": exp_avg_sq}
            return AdamW(params, stochastic_rounding=rounding, **dtypes, **SETTINGS)

        return Contestant(fp16, make, fp8_gradients=True, fp8_weights=fp8_weights)

    def ours_with_masters(params: list[nn.Parameter]) -> torch.optim.Optimizer:
        from nemo_lowprec.optim import AdamW

        formats: dict[str, Any] = dict.fromkeys(("exp_avg_dtype", "exp_avg_sq_dtype", "master_weight_dtype"), "fp32")
        return AdamW(params, **formats, **SETTINGS)

    def te(weights: torch.dtype, **dtypes: torch.dtype) -> Contestant:
        def make(params: list[nn.Parameter]) -> torch.optim.Optimizer:
            from transformer_engine.pytorch.optimizers import FusedAdam

            return FusedAdam(params, master_weights=True, **dtypes, **SETTINGS)

        return Contestant(weights, make, masters=True)

    def torchao(name: str) -> Contestant:
        def make(params: list[nn.Parameter]) -> torch.optim.Optimizer:
            import torchao.optim

            return getattr(torchao.optim, name)(params, **SETTINGS)

        return Contestant(bf16, make)

    return {
        "torch AdamW fused, FP32": Contestant(fp32, stock),
        "torch AdamW fused, BF16": Contestant(bf16, stock),
        "nemo_lowprec O1: FP16 weights, FP8 gradients, FP32+FP32 states": ours("fp32", "fp32"),
        "nemo_lowprec O2: FP16 weights, FP8 gradients, FP8+FP16 states": ours("fp8", "fp16"),
        "nemo_lowprec O2, stochastic rounding": ours("fp8", "fp16", rounding=True),
        "nemo_lowprec O3: O2 with FP8 weights and FP16 masters": ours("fp8", "fp16", fp8_weights=True),
        "nemo_lowprec O3, stochastic rounding": ours("fp8", "fp16", fp8_weights=True, rounding=True),
        "nemo_lowprec: BF16 weights, FP32 masters and states": Contestant(bf16, ours_with_masters, masters=True),
        "TE FusedAdam, FP16 weights and masters, FP8+FP16 states": te(
            fp16, master_weight_dtype=fp16, exp_avg_dtype=uint8, exp_avg_sq_dtype=fp16
        ),
        "TE FusedAdam, BF16 weights, FP32 masters and states": te(bf16),
        "torchao AdamWFp8, BF16": torchao("AdamWFp8"),
        "torchao AdamW8bit, BF16": torchao("AdamW8bit"),
    }


def milliseconds(work: Callable[[], Any], times: int) -> float:
    """Of one call, from ``times`` calls in a row."""
    if DEVICE.type != "cuda":
        start = time.perf_counter()
        for _ in range(times):
            work()
        return (time.perf_counter() - start) * 1e3 / times
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    work()  # the GPU is busy with this one while the host prepares the first that counts
    begin.record()
    for _ in range(times):
        work()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / times


def copy_bandwidth() -> float:
    """GB/s of torch's copy_, read and written: the best of several sizes."""
    best = 0.0
    for size in (2**30, 2**31, 2**32) if DEVICE.type == "cuda" else (2**26,):
        source = torch.zeros(size, dtype=torch.uint8, device=DEVICE)
        target = torch.empty_like(source)
        work = partial(target.copy_, source)
        milliseconds(work, WARMUP)
        best = max(best, *(2 * size / milliseconds(work, STEPS) / 1e6 for _ in range(3)))
    del source, target, work
    release()
    return best


def measure(contestant: Contestant, of: list[tuple[int, ...]]) -> dict[str, float]:
    """One round."""
    params = contestant.parameters(of)
    optimizer = contestant.make(params)
    for _ in range(WARMUP):
        optimizer.step()
    synchronize()
    reset_peak()
    before = allocated()
    start = time.perf_counter()
    optimizer.step()
    host = time.perf_counter() - start
    synchronize()
    temporaries = peaks()[0] - before
    ms = milliseconds(optimizer.step, STEPS)
    masters = [m for m in map(master_of, params) if m is not None]
    written = [p for p in params if contestant.masters or master_of(p) is not None]
    size = sizes(
        written=written, weights=params, gradients=[p.grad for p in params],
        states=[*optimizer.state.values(), *masters],
    )  # fmt: skip
    moved = size["written"] + 2 * size["weights"] + size["gradients"] + 2 * size["states"]
    return {"ms": ms, "host_ms": host * 1e3, "moved": moved, "state": size["states"], "temporaries": temporaries}


def main() -> None:
    parser = arguments(__doc__.split("\n")[0], "optimizer_step_h200.jsonl")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--vocab", type=int, default=32_768)
    parser.add_argument("--only", nargs="*", help="contestants whose name holds one of these")
    args = parser.parse_args()
    of = shapes(args.layers, args.hidden, args.vocab)
    count = sum(torch.Size(shape).numel() for shape in of)
    record = Record(args.out)
    record.add(benchmark="optimizer_step_shapes", parameters=count, tensors=len(of))
    field = {n: c for n, c in contestants().items() if not args.only or any(o in n for o in args.only)}
    rounds: dict[str, list[dict[str, float]]] = {name: [] for name in field}
    copies = []
    failed = set()
    for _ in range(args.rounds):
        copies.append(copy_bandwidth())
        for name, contestant in field.items():
            if name in failed:
                continue
            try:
                rounds[name].append(measure(contestant, of))
            except Exception as error:
                traceback.print_exc()
                failed.add(name)
                record.add(benchmark="optimizer_step", name=name, error=f"{type(error).__name__}: {error}"[:300])
            release()
    copy = max(copies)
    record.add(benchmark="optimizer_step_copy", gb_per_s=round(copy), by_round=[round(c) for c in copies])
    for name, figures in rounds.items():
        if not figures or name in failed:
            continue
        ms, host = ([f[key] for f in figures] for key in ("ms", "host_ms"))
        last = figures[-1]
        rate = last["moved"] / statistics.median(ms) / 1e6
        record.add(
            benchmark="optimizer_step", name=name, ms=round(statistics.median(ms), 3), ms_min=round(min(ms), 3),
            ms_max=round(max(ms), 3), rounds=len(ms), host_ms=round(statistics.median(host), 3),
            bytes_per_param=round(last["moved"] / count, 3), gb_per_s=round(rate), of_copy=round(rate / copy, 4),
            state_bytes_per_param=round(last["state"] / count, 4),
            temporaries_bytes_per_param=round(max(f["temporaries"] for f in figures) / count, 4),
        )  # fmt: skip


if __name__ == "__main__":
    main()

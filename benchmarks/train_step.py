"""Whole training steps under the Lightning Trainer, Llama-8B-shaped: our levels beside Lightning's and torchao.

    python -m benchmarks.train_step

All contestants run in one process, one after the other, with the same model, batches and optimizer (fused AdamW);
each figure is the median over rounds, from event to event on the GPU: the host does not wait between them. ``by hand``
is the loop of bf16_with_fp8_mixed without Lightning and without the plugin; ``Liger kernels`` are in the model, the
same for ours and others'. A file of results that is there is continued: contestants with a figure in it do not run
again.
"""

from __future__ import annotations

import gc
import statistics
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import lightning.pytorch as pl
import torch

from benchmarks.llama import BATCH, SEQUENCE, Llama, loader, loss_of, new_model
from benchmarks.measure import idle_in_graphs, stay_on_gpu
from benchmarks.record import Record, arguments, earlier
from nemo_lowprec.compute.attention import prefer_attention
from nemo_lowprec.plugins import LEVELS

WARMUP, ROUND = 16, 5  # steps: CUDA graphs come at the 13th at the latest


class Figures(NamedTuple):
    """Seconds a step, one a round, and the most bytes allocated, with all memory of CUDA graphs."""

    seconds: list[float]
    peak: int


class Rounds:
    """Seconds a step, over rounds of ``ROUND`` steps after ``WARMUP``, by events on the GPU, and the peak of memory.

    The host does not wait for the GPU between rounds: in training it prepares a step while the GPU works on another.
    """

    def __init__(self) -> None:
        self._events: list[torch.cuda.Event] = []

    def begin_step(self, index: int) -> None:
        if index < WARMUP or (index - WARMUP) % ROUND:
            return
        if index == WARMUP:
            torch.cuda.reset_peak_memory_stats()
        self._events.append(torch.cuda.Event(enable_timing=True))
        self._events[-1].record()

    def figures(self) -> Figures:
        torch.cuda.synchronize()
        seconds = [start.elapsed_time(end) / 1e3 / ROUND for start, end in pairwise(self._events)]
        return Figures(seconds, torch.cuda.max_memory_allocated() + idle_in_graphs())


class Clock(pl.Callback):
    """``Rounds`` of a Trainer, without what the end of training takes."""

    figures: Figures

    def __init__(self) -> None:
        self.rounds = Rounds()

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, index: int) -> None:
        self.rounds.begin_step(index)

    def on_train_end(self, trainer: Any, module: Any) -> None:
        self.figures = self.rounds.figures()
        stay_on_gpu(trainer, module)


def under_trainer(
    rounds: int,
    dtype: torch.dtype,
    prepare: Callable[[Any], None] | None = None,
    kind: type[Llama] = Llama,
    callbacks: Sequence[pl.Callback] = (),
    **kwargs: Any,
) -> Figures:
    module = kind(dtype)
    if prepare is not None:
        prepare(module)
    clock = Clock()
    trainer = pl.Trainer(
        accelerator="gpu", max_steps=WARMUP + ROUND * rounds + 1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, callbacks=[clock, *callbacks],
        **({"devices": 1} | kwargs),
    )  # fmt: skip
    trainer.fit(module, loader())
    return clock.figures


def by_hand(rounds: int) -> Figures:
    """bf16_with_fp8_mixed's loop without Lightning: half copies, FP32 masters, FP8 layers, fused AdamW.

    As the plugin does, it skips a step whose gradients are not finite.
    """
    from nemo_lowprec.chart.groups import LayerFilter
    from nemo_lowprec.chart.recipe import Recipe
    from nemo_lowprec.compute import DelayedAmaxes, choose_backend, convert_layers

    device = torch.device("cuda")
    model = new_model(torch.float32)
    recipe = Recipe("delayed")
    amaxes = DelayedAmaxes(recipe)
    backend = choose_backend("auto", recipe, device)
    convert_layers(
        model, torch.bfloat16, recipe, backend, None, LayerFilter(), amaxes.histories,
        weights=amaxes.weights,
    )  # fmt: skip
    params = list(model.parameters())
    masters = [torch.nn.Parameter(p.detach().clone()) for p in params]
    for p in params:
        p.data = p.data.bfloat16()
        p.grad_dtype = torch.float32
    amaxes.settle(device)
    optimizer = torch.optim.AdamW(masters, lr=1e-5, fused=True)
    clock = Rounds()
    for index, tokens in enumerate(loader()):
        clock.begin_step(index)
        if index == WARMUP + ROUND * rounds:
            return clock.figures()
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = loss_of(model, tokens.cuda(non_blocking=True))
        for p in params:
            p.grad = None
        loss.backward()
        for p, master in zip(params, masters, strict=True):
            master.grad = p.grad
        largest = torch._foreach_norm([p.grad for p in params], float("inf"))
        if bool(torch.stack(largest).isfinite().all()):
            optimizer.step()
            with torch.no_grad():
                torch._foreach_copy_(params, masters)
            amaxes.after_step(skipped=False)
    raise AssertionError("the loader is endless")


def _torchao(module: Llama, recipe: str = "tensorwise") -> None:
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    convert_to_float8_training(
        module.model,
        module_filter_fn=lambda m, name: "lm_head" not in name,
        config=Float8LinearConfig.from_recipe_name(recipe),
    )
    for layer in module.model.model.layers:
        layer.compile()


@contextmanager
def liger() -> Iterator[None]:
    """transformers' Llama with Liger's kernels for the rotary embedding, the gated activation and the norms."""
    from liger_kernel.transformers import apply_liger_kernel_to_llama
    from transformers.models.llama import modeling_llama

    own = {name: getattr(modeling_llama, name) for name in ("apply_rotary_pos_emb", "LlamaMLP", "LlamaRMSNorm")}
    apply_liger_kernel_to_llama(cross_entropy=False, fused_linear_cross_entropy=False)
    try:
        yield
    finally:
        for name, value in own.items():
            setattr(modeling_llama, name, value)


def contestants() -> dict[str, Callable[[int], Figures]]:
    from lightning.pytorch.plugins.precision import TransformerEnginePrecision

    bf16, fp32 = torch.bfloat16, torch.float32

    def te(rounds: int) -> Figures:
        return under_trainer(rounds, bf16, plugins=TransformerEnginePrecision(weights_dtype=bf16))

    def within(context: Callable[[], Any], run: Callable[[int], Figures]) -> Callable[[int], Figures]:
        def inside(rounds: int) -> Figures:
            with context():
                return run(rounds)

        return inside

    def ours(name: str, **options: Any) -> Callable[[int], Figures]:
        return lambda rounds: under_trainer(rounds, fp32, plugins=LEVELS[name](**options))

    return {
        "nemo_lowprec bf16_mixed": ours("bf16_mixed"),
        "nemo_lowprec bf16_with_fp8_mixed": ours("bf16_with_fp8_mixed"),
        "by hand bf16_with_fp8_mixed": by_hand,
        "lightning TransformerEnginePrecision, bf16 weights, no masters": te,
        "nemo_lowprec msamp_o2": ours("msamp_o2"),
        "nemo_lowprec msamp_o3": ours("msamp_o3"),
        "nemo_lowprec msamp_o2, cuDNN attention": ours("msamp_o2", attention="cudnn"),
        "nemo_lowprec msamp_o2, cuDNN attention, FP8 head": ours("msamp_o2", attention="cudnn", head="fp8"),
        "nemo_lowprec msamp_o3, cuDNN attention, FP8 head": ours("msamp_o3", attention="cudnn", head="fp8"),
        "nemo_lowprec bf16_with_fp8_mixed, cuDNN attention, FP8 head": ours(
            "bf16_with_fp8_mixed", attention="cudnn", head="fp8"
        ),
        "nemo_lowprec msamp_o2, cuDNN attention, FP8 head, fast_accum": ours(
            "msamp_o2", attention="cudnn", head="fp8", fast_accum=True
        ),
        "nemo_lowprec bf16_with_fp8_mixed, cuDNN attention, FP8 head, fast_accum": ours(
            "bf16_with_fp8_mixed", attention="cudnn", head="fp8", fast_accum=True
        ),
        "nemo_lowprec msamp_o2, cuDNN attention, FP8 head, fast_accum, graphs": ours(
            "msamp_o2", attention="cudnn", head="fp8", fast_accum=True, graphs=True
        ),
        "nemo_lowprec bf16_with_fp8_mixed, cuDNN attention, FP8 head, fast_accum, graphs": ours(
            "bf16_with_fp8_mixed", attention="cudnn", head="fp8", fast_accum=True, graphs=True
        ),
        "lightning TransformerEnginePrecision, bf16 weights, no masters, cuDNN attention": within(
            lambda: prefer_attention("cudnn"), te
        ),
        "lightning TransformerEnginePrecision, bf16 weights, no masters, Liger kernels": within(liger, te),
        "nemo_lowprec msamp_o2, cuDNN attention, FP8 head, Liger kernels": within(
            liger, ours("msamp_o2", attention="cudnn", head="fp8")
        ),
        "nemo_lowprec msamp_o3, cuDNN attention, FP8 head, Liger kernels": within(
            liger, ours("msamp_o3", attention="cudnn", head="fp8")
        ),
        "nemo_lowprec msamp_o1": ours("msamp_o1"),
        "nemo_lowprec msamp_o2, stochastic_rounding": ours("msamp_o2", stochastic_rounding=True),
        "nemo_lowprec msamp_o2, gradient_release": ours("msamp_o2", gradient_release=True),
        "nemo_lowprec bf16_with_fp8_mixed, fp8_params": ours("bf16_with_fp8_mixed", fp8_params=True),
        "nemo_lowprec bf16_with_fp8_mixed, torch backend": ours("bf16_with_fp8_mixed", backend="torch"),
        "nemo_lowprec bf16_with_fp8_current_scaling_mixed": ours("bf16_with_fp8_current_scaling_mixed"),
        "nemo_lowprec bf16_with_fp8_rowwise_mixed": ours("bf16_with_fp8_rowwise_mixed"),
        "nemo_lowprec bf16_with_fp8_rowwise_mixed, fast_accum": ours("bf16_with_fp8_rowwise_mixed", fast_accum=True),
        "nemo_lowprec bf16_with_fp8_rowwise_mixed, wgrad in half": ours(
            "bf16_with_fp8_rowwise_mixed", override_linear_precision=(False, False, True)
        ),
        "nemo_lowprec bf16_with_fp8_subchannel_scaling_mixed": ours("bf16_with_fp8_subchannel_scaling_mixed"),
        "nemo_lowprec fp16_with_fp8_mixed": ours("fp16_with_fp8_mixed"),
        "nemo_lowprec fp16_mixed": ours("fp16_mixed"),
        "nemo_lowprec te_fp8": ours("te_fp8"),
        "nemo_lowprec fp16_amp": ours("fp16_amp"),
        "lightning bf16-mixed": lambda rounds: under_trainer(rounds, fp32, precision="bf16-mixed"),
        "lightning bf16-true": lambda rounds: under_trainer(rounds, bf16, precision="bf16-true"),
        "lightning TransformerEnginePrecision, FP32 weights": lambda rounds: under_trainer(
            rounds, fp32, plugins=TransformerEnginePrecision(weights_dtype=fp32)
        ),
        "torchao float8 tensorwise, compiled layers, bf16-true": lambda rounds: under_trainer(
            rounds, bf16, prepare=_torchao, precision="bf16-true"
        ),
        **{
            f"torchao float8 {recipe}, compiled layers, bf16-true": lambda rounds, recipe=recipe: under_trainer(
                rounds, bf16, prepare=partial(_torchao, recipe=recipe), precision="bf16-true"
            )
            for recipe in ("rowwise", "rowwise_with_gw_hp")
        },
    }


def main() -> None:
    parser = arguments(__doc__.split("\n")[0], "train_step_h200.jsonl")
    parser.add_argument("--rounds", type=int, default=4, help=f"rounds of {ROUND} steps a contestant and pass")
    parser.add_argument("--passes", type=int, default=1, help="times that the whole field runs")
    parser.add_argument("--only", nargs="*", help="contestants of these names, or that hold them")
    args = parser.parse_args()
    kept = [line for line in earlier(args.out, "train_step") if "error" not in line]
    have = {line["name"] for line in kept if "name" in line}
    record = Record(args.out, kept)
    tokens = BATCH * SEQUENCE
    everybody = contestants()
    of_names = [name for name in everybody if name in (args.only or ())]
    chosen = of_names or [n for n in everybody if not args.only or any(part in n for part in args.only)]
    field = {name: everybody[name] for name in chosen if name not in have}
    seconds: dict[str, list[float]] = {name: [] for name in field}
    peaks: dict[str, float] = {}
    for turn in range(args.passes):
        for name, run in field.items():
            torch.cuda.empty_cache()
            try:
                found = run(args.rounds)
                seconds[name] += found.seconds
                peaks[name] = found.peak / 2**30
            except Exception as error:
                traceback.print_exc()
                record.add(benchmark="train_step", name=name, error=f"{type(error).__name__}: {error}"[:300])
            gc.collect()
            values = seconds[name]
            if values and turn == args.passes - 1:
                median = statistics.median(values)
                record.add(
                    benchmark="train_step", name=name, tokens_per_s=round(tokens / median), ms=round(median * 1e3, 2),
                    ms_min=round(min(values) * 1e3, 2), ms_max=round(max(values) * 1e3, 2), rounds=len(values),
                    peak_gib=round(peaks[name], 2),
                )  # fmt: skip


if __name__ == "__main__":
    main()

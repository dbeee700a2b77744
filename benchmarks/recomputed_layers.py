"""Layers that are recomputed in backward, with CUDA graphs and without, by the GPU time over the host time of a layer.

    python -m benchmarks.recomputed_layers

``ratio`` is what ``graphs="auto"`` decides by: the GPU time of a layer's forward pass over its host time, each of the
fastest layer. ``gain`` is the time of a step without graphs over the time with graphs. Both models train in turns, in
one process, and each time is the median over rounds.
"""

from __future__ import annotations

import statistics
import time
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.measure import release, synchronize
from benchmarks.record import Record, arguments
from nemo_lowprec import prepare
from nemo_lowprec.compat.autograd import current_backward
from nemo_lowprec.compute.graphs.pool import Clock

LEVELS = ("msamp_o2", "bf16_with_fp8_mixed")
WARMUP, CLOCKED, STEPS = 14, 3, 6  # steps: CUDA graphs come at the 13th at the latest
_VOCAB = 32_000


class Case(NamedTuple):
    """Layers of a Llama, and its micro-batches as (sequences, tokens of each)."""

    hidden: int
    intermediate: int
    layers: int
    batches: tuple[tuple[int, int], ...]


CASES = {
    "Llama 8B": Case(4096, 14336, 4, ((1, 512), (1, 1024), (1, 2048), (1, 4096), (1, 8192))),
    "Llama 1.1B": Case(2048, 5632, 8, ((1, 512), (1, 2048), (4, 2048))),
}


class _Training:
    """A model that is trained on one batch."""

    def __init__(self, case: Case, level: str, graphs: bool) -> None:
        torch.manual_seed(0)
        config = LlamaConfig(
            hidden_size=case.hidden, intermediate_size=case.intermediate, num_hidden_layers=case.layers,
            num_attention_heads=case.hidden // 128, num_key_value_heads=8, vocab_size=_VOCAB, use_cache=False,
        )  # fmt: skip
        with torch.device("cuda"):
            model = LlamaForCausalLM(config).train()
        model.gradient_checkpointing_enable({"use_reentrant": False})
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
        self.model, self.optimizer = prepare(model, optimizer, level, graphs=graphs)

    def steps(self, ids: Tensor, count: int) -> float:
        """Mean seconds of ``count`` steps."""
        synchronize()
        start = time.perf_counter()
        for _ in range(count):
            with torch.autocast("cuda", torch.bfloat16):
                loss = self.model(input_ids=ids, labels=ids).loss
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
        synchronize()
        return (time.perf_counter() - start) / count

    def clocks(self, ids: Tensor) -> list[Clock]:
        """Clocks of all layers' forward passes in some steps, but for passes that backward recomputes."""
        begun, done = dict[nn.Module, Clock](), list[Clock]()

        def begin(layer: nn.Module, *_: Any) -> None:
            if current_backward() == -1:
                begun[layer] = Clock()

        def end(layer: nn.Module, *_: Any) -> None:
            if current_backward() == -1:
                clock = begun.pop(layer)
                clock.stop()
                done.append(clock)

        hooks = []
        for layer in self.model.model.layers:
            hooks += [layer.register_forward_pre_hook(begin), layer.register_forward_hook(end)]
        self.steps(ids, CLOCKED)
        for hook in hooks:
            hook.remove()
        return done


def measure(case: Case, level: str, batch: int, tokens: int, rounds: int) -> dict[str, Any]:
    """The figures of a micro-batch."""
    ids = torch.randint(_VOCAB, (batch, tokens), device="cuda", generator=torch.Generator("cuda").manual_seed(0))
    trainings = {graphs: _Training(case, level, graphs) for graphs in (True, False)}
    for training in trainings.values():
        training.steps(ids, WARMUP)
    clocks = trainings[False].clocks(ids)
    gpu, host = (min(map(of, clocks)) for of in (Clock.gpu, Clock.host))
    times: dict[bool, list[float]] = {True: [], False: []}
    for _ in range(rounds):
        for graphs, training in trainings.items():
            times[graphs].append(training.steps(ids, STEPS))
    with_graphs, without = (statistics.median(times[graphs]) for graphs in (True, False))
    return {
        "gpu_ms": round(gpu * 1e3, 3), "host_ms": round(host * 1e3, 3), "ratio": round(gpu / host, 2),
        "graphs_ms": round(with_graphs * 1e3, 2), "no_graphs_ms": round(without * 1e3, 2),
        "gain": round(without / with_graphs, 3), "rounds": rounds,
    }  # fmt: skip


def main() -> None:
    parser = arguments(__doc__.split("\n")[0], "recomputed_layers_h200.jsonl")
    parser.add_argument("--cases", nargs="*", choices=CASES, default=list(CASES))
    parser.add_argument("--levels", nargs="*", default=LEVELS)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    record = Record(args.out)
    for name in args.cases:
        for level in args.levels:
            for batch, tokens in CASES[name].batches:
                figure = measure(CASES[name], level, batch, tokens, args.rounds)
                record.add(
                    benchmark="recomputed_layers", model=name, level=level, batch=batch, sequence=tokens, **figure
                )
                release()


if __name__ == "__main__":
    main()

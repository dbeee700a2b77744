"""Host time of one linear layer, forward and backward: nn.Linear, te.Linear and every level of Hopper.

    python -m benchmarks.host

A chain of layers so small that the GPU waits for the host. Contestants run in turns, round by round, in one process;
each figure is the median over rounds. A turn is a few steps. The first step of a turn counts for ``first_both_us`` and
``first_ratio`` alone: after the turns of the others the processor's caches hold nothing of this contestant, as never in
training. ``step_us`` is the optimizer's step with ``zero_grad``, a layer. Under autocast ``nn.Linear`` casts its weight
once a step, as in training.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.levels import HOPPER
from benchmarks.record import Record, arguments
from nemo_lowprec import CHART, prepare

LAYERS, WIDTH, ROWS = 48, 256, 64
WARMUP, STEPS = 6, 4


def chain(linear: Callable[..., nn.Module] = nn.Linear) -> nn.Module:
    """Equal layers, one after the other, without an activation between them; values keep their size in all of them."""
    layers = [linear(WIDTH, WIDTH, bias=False).cuda() for _ in range(LAYERS)]
    for layer in layers:
        nn.init.normal_(layer.weight, std=WIDTH**-0.5)
    return nn.Sequential(*layers)


class Contestant:
    """A chain, its optimizer and the host's clock."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, context: Callable[[], Any]) -> None:
        self.model, self.optimizer, self.context = model, optimizer, context
        self.rounds: list[list[tuple[float, float, float]]] = []

    def round(self, x: Tensor, grad: Tensor) -> None:
        """One turn."""
        self.rounds.append([self._step(x, grad) for _ in range(STEPS)])

    def _step(self, x: Tensor, grad: Tensor) -> tuple[float, float, float]:
        """The times of one training step; the GPU has nothing left to do when a clock starts."""
        torch.cuda.synchronize()
        times = [time.perf_counter()]
        with self.context():
            out = self.model(x)
        times.append(time.perf_counter())
        torch.cuda.synchronize()
        started = time.perf_counter()
        out.backward(grad.to(out.dtype))
        times.append(time.perf_counter() - started + times[-1])
        torch.cuda.synchronize()
        started = time.perf_counter()
        self.optimizer.step()
        self.optimizer.zero_grad()
        times.append(time.perf_counter() - started + times[-1])
        a, b, c, d = times
        return b - a, c - b, d - c

    def microseconds(self, first: bool = False) -> tuple[float, float, float]:
        """Medians a layer of forward, backward and the step: of the turns' ``first`` steps, or of the others."""
        counted = [step for turn in self.rounds[WARMUP:] for step in (turn[:1] if first else turn[1:])]
        forward, backward, step = (statistics.median(part) * 1e6 / LAYERS for part in zip(*counted, strict=True))
        return forward, backward, step


def _adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)


def _plain(linear: Callable[..., nn.Module] = nn.Linear) -> Contestant:
    model = chain(linear)
    return Contestant(model, _adam(model), lambda: torch.autocast("cuda", torch.bfloat16))


def _te() -> Contestant:
    import transformer_engine.pytorch as te
    from transformer_engine.common.recipe import DelayedScaling

    model = chain(te.Linear)

    class Both:
        def __enter__(self) -> None:
            self.inner = torch.autocast("cuda", torch.bfloat16), te.autocast(enabled=True, recipe=DelayedScaling())
            for one in self.inner:
                one.__enter__()

        def __exit__(self, *args: Any) -> None:
            for one in reversed(self.inner):
                one.__exit__(*args)

    return Contestant(model, _adam(model), Both)


def _ours(level: str, **options: Any) -> Contestant:
    model = chain()
    if CHART[level].has_fp8:
        options = {"convert": None, **options}  # these layers are too small to gain
    model, optimizer = prepare(model, _adam(model), level, **options)
    half = torch.float16 if level.startswith("fp16") else torch.bfloat16
    return Contestant(model, optimizer, lambda: torch.autocast("cuda", half))


def contestants() -> dict[str, Callable[[], Contestant]]:
    ours: dict[str, Callable[[], Contestant]] = {level: (lambda level=level: _ours(level)) for level in HOPPER}
    return {"nn.Linear": _plain, "te.Linear, FP8": _te, **ours}


def main() -> None:
    parser = arguments(__doc__.split("\n")[0], "host_h200.jsonl")
    parser.add_argument("--rounds", type=int, default=20)
    args = parser.parse_args()
    record = Record(args.out)
    x = torch.randn(ROWS, WIDTH, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    grad = torch.randn(ROWS, WIDTH, device="cuda")
    field = {name: make() for name, make in contestants().items()}
    gc.freeze()  # so that no contestant waits while the objects of all others are looked through
    for _ in range(WARMUP + args.rounds):
        for one in field.values():
            one.round(x, grad)
    plain, plain_first = (sum(field["nn.Linear"].microseconds(first)[:2]) for first in (False, True))
    for name, one in field.items():
        forward, backward, step = one.microseconds()
        both, of_first = forward + backward, sum(one.microseconds(first=True)[:2])
        record.add(
            benchmark="host", name=name, forward_us=round(forward, 1), backward_us=round(backward, 1),
            step_us=round(step, 1), both_us=round(both, 1), ratio=round(both / plain, 2),
            first_both_us=round(of_first, 1), first_ratio=round(of_first / plain_first, 2),
        )  # fmt: skip


if __name__ == "__main__":
    main()

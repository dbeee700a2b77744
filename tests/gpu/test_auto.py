"""``convert="auto"`` on a GPU: small layers are left, with graphs and without, and are as fast as ``nn.Linear``."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from nemo_lowprec import prepare
from nemo_lowprec.compute import gemm_plans
from nemo_lowprec.compute.graphs.graphed import GraphedForward

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
    pytest.mark.usefixtures("measured_times"),
]

LEVELS = ["bf16_with_fp8_mixed", "te_fp8", "msamp_o2", "msamp_o3"]
WIDTH, ROWS = 128, 8192
SMALL = {f"blocks.{i}.{name}" for i in range(2) for name in ("up", "down")}


class Block(nn.Module):
    """At 8192 rows a layer with 128 features on one side loses by FP8, and one of 4096 × 4096 gains."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.mid, self.down = nn.Linear(WIDTH, 4096), nn.Linear(4096, 4096), nn.Linear(4096, WIDTH)

    def forward(self, x):
        return x + self.down(F.gelu(self.mid(F.gelu(self.up(self.norm(x))))))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.blocks = nn.ModuleList([Block(), Block()])

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def in_fp8(model):
    return {plan.name for m in model.modules() for plan in gemm_plans(m).values() if plan.recipe is not None}


def captured(model):
    forwards = [m.__dict__.get("forward") for m in model.modules()]
    return sum(len(found) for f in forwards if isinstance(f, GraphedForward) for found in f._passes.values())


def train(level, steps=8, **options):
    model = Model().cuda()
    model, optimizer = prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True), level, **options)
    x, losses, low = torch.randn(ROWS, WIDTH, device="cuda", generator=torch.Generator("cuda").manual_seed(3)), [], []
    for _ in range(steps):
        low.append(in_fp8(model))
        with torch.autocast("cuda", torch.bfloat16):
            loss = model(x).float().pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, low, model


@pytest.mark.parametrize("level", LEVELS)
def test_small_layers_are_left_and_graphs_come_after(level):
    eager, low, model = train(level, graphs=False)
    assert low[0] - low[1] == SMALL
    assert low[1] == low[-1] == {"blocks.0.mid", "blocks.1.mid"}
    assert captured(model) == 0
    graphed, again, model = train(level, graphs=True)
    assert again == low and graphed == eager
    assert captured(model) > 0


@pytest.mark.parametrize(
    "options", [{"activations": "fp8"}, {"activations": "fp8+recompute"}, {"backend": "reference"}]
)
def test_other_options(options):
    losses, low, _ = train("bf16_with_fp8_mixed", steps=4, **options)
    assert all(map(math.isfinite, losses))
    # The reference backend emulates FP8, and gains by no layer.
    assert (low[-1] == low[0]) is ("backend" in options)


def captured_step(model, x):
    """Forward and backward as one CUDA graph."""

    def run():
        with torch.autocast("cuda", torch.bfloat16, cache_enabled=False):
            model(x).float().sum().backward()

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph


def microseconds(*models):
    """GPU time of a step of each model: the shortest, in turns, since other processes may use the GPU."""
    x = torch.randn(ROWS, WIDTH, device="cuda")
    steps, times = [captured_step(model, x) for model in models], [[] for _ in models]
    for _ in range(200):
        for step, of in zip(steps, times, strict=True):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            step.replay()
            end.record()
            end.synchronize()
            of.append(start.elapsed_time(end) * 1e3)
    return list(map(min, times))


@pytest.mark.parametrize("level", ["bf16_with_fp8_mixed", "te_fp8"])
def test_a_left_layer_is_as_fast_as_one_that_is_skipped(level):
    _, _, left = train(level, steps=3, graphs=False)
    _, _, skipped = train(level, steps=3, graphs=False, skip=["*.up", "*.down"], convert=None)
    assert in_fp8(left) == in_fp8(skipped)
    times = microseconds(left, skipped)
    assert times[0] <= 1.05 * times[1], times


@pytest.mark.parametrize("level", ["bf16_with_fp8_mixed", "te_fp8"])
def test_the_choice_is_faster_than_everything_in_fp8(level):
    _, _, chosen = train(level, steps=4, graphs=False)
    _, _, everything = train(level, steps=4, graphs=False, convert=None)
    times = microseconds(chosen, everything)
    assert times[0] <= 1.02 * times[1], times

"""The monitor on a GPU: training is the same, bit for bit, and sampled steps run as graphs, too."""

import gc
from collections import Counter

import pytest
import torch
from torch import nn

from nemo_lowprec import CHART, monitor, prepare
from nemo_lowprec.compute.graphs.graphed import GraphedForward
from nemo_lowprec.report.monitor import read_run

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

LEVELS = [
    "te_fp8", "msamp_o1", "msamp_o2", "msamp_o3", "bf16_mixed", "fp16_with_fp8_mixed", "bf16_with_fp8_mixed",
    "bf16_with_fp8_current_scaling_mixed", "bf16_with_fp8_rowwise_mixed", "bf16_with_fp8_subchannel_scaling_mixed",
]  # fmt: skip
WIDTH, ROWS, STEPS = 128, 64, 16


class Gated(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.up = (nn.Linear(WIDTH, 2 * WIDTH, bias=False) for _ in range(2))
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x):
        return self.down(nn.functional.silu(self.gate(x)) * self.up(x))


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.act, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        return self.down(self.act(self.up(x)))


class Block(nn.Module):
    def __init__(self, mlp):
        super().__init__()
        self.norm, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.mlp = mlp()

    def forward(self, x):
        h = self.norm(x)
        q, k, v = (layer(h).unflatten(-1, (4, 32)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        mixed = nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        x = x + self.out(mixed)
        return x + self.mlp(self.norm2(x))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList([Block(mlp) for mlp in (Gated, Mlp, Gated, Mlp)])
        self.head = nn.Linear(WIDTH, 16)

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def run(level, graphs, folder=None, accumulate=1, every=3, rows=ROWS):
    """(the losses, the weights at the end, the model) of a training, monitored where there is a ``folder``."""
    torch.manual_seed(0)
    model = Model().cuda()
    if graphs == "blocks":
        model.first.register_forward_hook(lambda *_: None)  # so that the model is not one graph
    model, optimizer = prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3), level, graphs=graphs is not False)
    watch = None if folder is None else monitor(model, folder, every)
    half = torch.float16 if CHART[level].autocast == "fp16" else torch.bfloat16
    scaler = torch.amp.GradScaler("cuda", enabled=half == torch.float16, init_scale=2.0**10)
    generator = torch.Generator("cuda").manual_seed(1)
    losses = []
    for _ in range(STEPS):
        for _ in range(accumulate):
            x = torch.randn(2, rows, WIDTH, device="cuda", generator=generator)
            with torch.autocast("cuda", dtype=half):
                loss = model(x).float().pow(2).mean()
            scaler.scale(loss / accumulate).backward()
            losses.append(loss.detach())
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        if watch is not None:
            watch.add_loss(losses[-1])
    if watch is not None:
        watch.close()
    return torch.stack(losses).tolist(), {n: p.detach().float().clone() for n, p in model.named_parameters()}, model


def passes(model):
    """Captured passes by the number of their observers."""
    found = Counter()
    for module in model.modules():
        forward = module.__dict__.get("forward")
        if isinstance(forward, GraphedForward):
            for key, captured in forward._passes.items():
                found["observed" if key in forward._observed else "plain"] += len(captured)
    return found


@pytest.mark.parametrize("graphs", [False, "whole", "blocks"])
@pytest.mark.parametrize("level", LEVELS)
def test_a_monitored_training_is_the_same(level, graphs, tmp_path):
    losses, weights, _ = run(level, graphs)
    watched, own, model = run(level, graphs, tmp_path)
    assert watched == losses
    assert all(torch.equal(own[name], values) for name, values in weights.items())
    found = passes(model)
    if graphs:
        blocks = 1 if graphs == "whole" else len(model.blocks)
        assert found["observed"] >= blocks * (CHART[level].has_fp8 or CHART[level].is_low_bit), found
    run_ = read_run(tmp_path)
    assert run_.steps == [2, 3, 6, 9, 12, 15] and run_.ended and len(run_.loss) == STEPS
    if CHART[level].has_fp8:
        layers = {layer for layer, _ in run_.operands.rows}
        assert {"first", "blocks.0.q", "blocks.0.mlp.gate", "blocks.1.mlp.down", "blocks.3.mlp.up"} <= layers
        sqnr = run_.operands.metrics["sqnr"]
        for layer in layers - {"head"}:
            for kind, least in (("input", 25), ("grad_output", 18)):
                assert all(value is not None and least < value < 40 for value in sqnr[layer, kind]), (layer, kind)


@pytest.mark.parametrize("level", ["bf16_with_fp8_mixed", "msamp_o2", "bf16_with_fp8_subchannel_scaling_mixed"])
def test_samples_of_graphs_are_those_without(level, tmp_path):
    tables = []
    for graphs in (False, "whole", "blocks"):
        run(level, graphs, tmp_path / str(graphs))
        found = read_run(tmp_path / str(graphs))
        tables.append((found.operands, found.params))
    for other in tables[1:]:
        for table, wanted in zip(other, tables[0], strict=True):
            assert table.rows == wanted.rows
            for metric, rows in wanted.metrics.items():
                for row, numbers in rows.items():
                    for got, want in zip(table.metrics[metric][row], numbers, strict=True):
                        assert got == (None if want is None else pytest.approx(want, rel=5e-3, abs=1e-6)), (metric, row)


@pytest.mark.parametrize("level", ["bf16_with_fp8_mixed", "msamp_o2"])
def test_accumulated_gradients(level, tmp_path):
    losses, weights, _ = run(level, "whole", accumulate=3)
    watched, own, _ = run(level, "whole", tmp_path, accumulate=3)
    assert watched == losses and all(torch.equal(own[name], values) for name, values in weights.items())


def test_observed_graphs_take_the_memory_of_the_others(tmp_path):
    """A second pass of a whole model in the memory of the first one's: gradients and results are all that is added."""
    reserved, peaks = [], []
    for folder in (None, tmp_path):
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_reserved()
        kept = run("bf16_with_fp8_mixed", "whole", folder, rows=16384)
        assert (passes(kept[2])["observed"] > 0) == (folder is not None)
        peaks.append(torch.cuda.max_memory_reserved() - before)
        torch.cuda.empty_cache()
        reserved.append(torch.cuda.memory_reserved() - before)
        del kept
    assert reserved[0] > 2**28 and reserved[1] < 1.25 * reserved[0]
    assert peaks[1] < 1.25 * peaks[0]

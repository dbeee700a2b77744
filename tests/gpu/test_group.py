"""Layers that compute as one on a GPU: operands in one memory, kept weights, CUDA graphs."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from nemo_lowprec import prepare
from nemo_lowprec.compute import gemm_plans
from nemo_lowprec.compute.backends.reference import ReferenceBackend
from nemo_lowprec.compute.backends.scaled_mm import ScaledMMBackend
from nemo_lowprec.compute.graphs.graphed import GraphedForward
from nemo_lowprec.compute.group import LayerGroups
from nemo_lowprec.compute.operands import Operand
from nemo_lowprec.engine import Engine
from nemo_lowprec.formats import E4M3, E5M2, DelayedScaling

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]

BF16, SIZE = torch.bfloat16, 128


def operand(kind, fmt, largest):
    histories = DelayedScaling(4)
    histories.add_all({"x": fmt})
    histories.to(torch.device("cuda"))
    slot = histories.slots["x"]
    slot.record(torch.tensor([largest], device="cuda"))
    histories.update()
    return Operand(kind, "delayed", fmt, slot=slot)


def random(rows, cols, dtype=BF16, seed=0):
    generator = torch.Generator("cuda").manual_seed(seed + rows * cols)
    return torch.randn(rows, cols, device="cuda", generator=generator).to(dtype)


def assert_same_operand(got, want):
    for mine, other in ((got.rowwise, want.rowwise), (got.columnwise, want.columnwise)):
        assert (mine is None) == (other is None)
        if mine is not None:
            assert torch.equal(mine.data.view(torch.uint8), other.data.view(torch.uint8))
            assert torch.equal(mine.scale_inv, other.scale_inv)


@pytest.mark.parametrize("rows", [16, 80, 4096])
@pytest.mark.parametrize("widths", [(64, 16, 16), (16, 208), (4096, 1024, 1024)])
@pytest.mark.parametrize("kinds", [(True, True), (True, False), (False, True)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gradients_side_by_side_are_quantized_as_one(rows, widths, kinds, dtype):
    how = {"rowwise": kinds[0], "columnwise": kinds[1], "record": True, "sums": True}
    parts = [random(rows, width, dtype) for width in widths]
    parts[1] = torch.cat([parts[1], parts[1]], 1)[:, : widths[1]]  # a part of another matrix
    mine, other = operand("grad_output", E5M2, 3.0), operand("grad_output", E5M2, 3.0)
    got, sums = ScaledMMBackend().quantize_parts(parts, mine, **how)
    want, want_sums = ReferenceBackend().quantize_parts(parts, other, **how)
    want = ScaledMMBackend()._orient(
        want.rowwise or want.columnwise._replace(data=want.columnwise.data.t()), *kinds
    )  # fmt: skip
    assert_same_operand(got, want)
    assert torch.equal(mine.slot.amax, other.slot.amax)
    torch.testing.assert_close(sums, want_sums, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("columnwise", [True, False])
def test_weights_below_each_other_are_quantized_as_one(dtype, columnwise):
    weights = [random(height, 96, dtype) for height in (64, 16, 16)]
    of = operand("weight", E4M3, 4.0)
    got = ScaledMMBackend().quantize_weights(weights, of, rowwise=True, columnwise=columnwise)
    want = ReferenceBackend().quantize_weights(weights, of, rowwise=True, columnwise=columnwise)
    assert_same_operand(got, ScaledMMBackend()._orient(want.rowwise, True, columnwise))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(SIZE), nn.RMSNorm(SIZE)
        self.q, self.out = nn.Linear(SIZE, SIZE), nn.Linear(SIZE, SIZE)
        self.k, self.v = nn.Linear(SIZE, 64), nn.Linear(SIZE, 64)
        self.mlp = Gated()

    def forward(self, x):
        h = self.norm1(x)
        q, k, v = (layer(h).unflatten(-1, (-1, 32)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        k, v = (t.repeat_interleave(2, 1) for t in (k, v))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class Gated(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.up = nn.Linear(SIZE, 256, bias=False), nn.Linear(SIZE, 256, bias=False)
        self.down, self.act = nn.Linear(256, SIZE, bias=False), nn.SiLU()

    def forward(self, x):
        return self.down(self.act(self.gate(x)) * self.up(x))


def made(level, **options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(SIZE, SIZE), nn.Sequential(*(Block() for _ in range(3)))).cuda()
    options.setdefault("graphs", False)
    options.setdefault("backend", "torch")
    return prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3), level, **options)


def train(model, optimizer, steps=8, accumulate=1):
    generator, losses = torch.Generator("cuda").manual_seed(1), []
    for _ in range(steps):
        for _ in range(accumulate):
            x, target = torch.randn(2, 4, 64, SIZE, device="cuda", generator=generator)
            with torch.autocast("cuda", BF16):
                loss = F.mse_loss(model(x).float(), target)
            (loss / accumulate).backward()
            losses.append(loss.detach())
        found = [p.grad for p in model.parameters()]
        optimizer.step()
        optimizer.zero_grad()
    return torch.stack(losses).tolist(), found


def groups(model):
    plans = [plan for module in model.modules() for plan in gemm_plans(module).values()]
    return {plan.group.names for plan in plans if plan.group is not None}


@pytest.mark.parametrize("level", ["bf16_with_fp8_mixed", "msamp_o1", "msamp_o2", "te_fp8"])
@pytest.mark.parametrize("weight_cache", [True, False])
def test_losses_are_those_of_single_layers_but_for_roundings(level, weight_cache, monkeypatch):
    model, optimizer = made(level, weight_cache=weight_cache)
    losses, _ = train(model, optimizer)
    assert len(groups(model)) == 6
    reference, optimizer = made(level, backend="reference", weight_cache=weight_cache)
    of_reference, _ = train(reference, optimizer)
    monkeypatch.setattr(LayerGroups, "_can", lambda *_: False)
    single, optimizer = made(level, weight_cache=weight_cache)
    want, _ = train(single, optimizer)
    assert not groups(single) and losses[0] == want[0]
    torch.testing.assert_close(losses, want, rtol=0.01, atol=0.0)
    torch.testing.assert_close(losses, of_reference, rtol=0.01, atol=0.0)


@pytest.mark.parametrize("level", ["bf16_with_fp8_mixed", "msamp_o2"])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_graphs_give_the_same_bits(level, accumulate):
    found = []
    for graphs in (False, True):
        model, optimizer = made(level, graphs=graphs)
        found.append(train(model, optimizer, accumulate=accumulate))
        assert len(groups(model)) == 6
        forwards = [m.__dict__.get("forward") for m in model.modules()]
        captured = sum(len(p) for f in forwards if isinstance(f, GraphedForward) for p in f._passes.values())
        assert (captured > 0) == graphs
    (losses, grads), (want, want_grads) = found
    assert losses == want
    for got, other in zip(grads, want_grads, strict=True):
        assert torch.equal(got.float(), other.float())


def test_the_gradients_of_a_group_are_rows_of_one_memory():
    for graphs in (False, True):
        model, optimizer = made("bf16_with_fp8_mixed", graphs=graphs)
        _, grads = train(model, optimizer)
        by_name = dict(zip((name for name, _ in model.named_parameters()), grads, strict=True))
        q, k = by_name["1.1.q.weight"], by_name["1.1.k.weight"]
        assert k.data_ptr() == q.data_ptr() + q.numel() * q.element_size()


@pytest.mark.parametrize("level", ["bf16_with_fp8_mixed", "msamp_o2"])
def test_kept_weights_follow_the_step_and_serve_single_layers(level):
    model, optimizer = made(level, weight_cache=True)
    train(model, optimizer)
    memory = [plan.weight._kept.rowwise.data.data_ptr() for plan in gemm_plans(model[1][0].q).values()]
    train(model, optimizer, steps=1)
    assert memory == [plan.weight._kept.rowwise.data.data_ptr() for plan in gemm_plans(model[1][0].q).values()]
    x = torch.randn(4, 64, SIZE, device="cuda", generator=torch.Generator("cuda").manual_seed(3))

    def passed():
        leaf = x.clone().requires_grad_()
        with torch.autocast("cuda", BF16):
            model(leaf).float().pow(2).mean().backward()
        return leaf.grad

    together = passed()
    model.eval()
    alone = passed()  # reads the kept operands of the group
    assert (together - alone).norm() < 0.05 * alone.norm()
    for module in model.modules():
        for plan in gemm_plans(module).values():
            plan.weight.drop()
    assert torch.equal(passed(), alone)


@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("weight_cache", [False, True])
def test_layers_that_compute_by_themselves_again(weight_cache, graphs, monkeypatch):
    """Each reads its weight with a scale of its own, whatever was kept or captured of the group."""
    model, optimizer = made("bf16_with_fp8_mixed", weight_cache=weight_cache, graphs=graphs)
    with torch.no_grad():
        for block in model[1]:
            block.v.weight.mul_(16)  # whose scale the group has
    train(model, optimizer)
    assert len(groups(model)) == 6
    monkeypatch.setattr(LayerGroups, "_can", lambda *_: False)
    computation = Engine.of(model).columns.computation
    computation._joined.part()
    x = torch.randn(4, 64, SIZE, device="cuda", generator=torch.Generator("cuda").manual_seed(3))
    found = []
    for _ in range(2):
        with torch.autocast("cuda", BF16):
            loss = model(x).float().pow(2).mean()
        loss.backward()
        found.append([loss.detach(), *(p.grad.float() for p in model.parameters())])
        optimizer.zero_grad()
        computation.settle()  # nothing is kept, captured or measured any more
    for got, want in zip(*found, strict=True):
        assert torch.equal(got, want)

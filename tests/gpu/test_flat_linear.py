"""Layers in few steps on the host against ``linear_function``: equal bit for bit."""

import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from nemo_lowprec import prepare
from nemo_lowprec.compute import flat_linear, linear
from nemo_lowprec.compute.gemm_plan import GemmPlan
from nemo_lowprec.compute.group import LayerGroup
from nemo_lowprec.observers import Observer

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
LEVELS = [
    "bf16_with_fp8_mixed", "fp16_with_fp8_mixed", "msamp_o1", "msamp_o2", "bf16_with_fp8_current_scaling_mixed",
    "bf16_with_fp8_rowwise_mixed", "bf16_with_fp8_subchannel_scaling_mixed",
]  # fmt: skip


class Block(nn.Module):
    """Layers in a row, layers with one input, a layer whose output has no gradient, a layer that runs twice."""

    def __init__(self, bias):
        super().__init__()
        self.first = nn.Linear(64, 96, bias=bias)
        self.q, self.k, self.v = (nn.Linear(96, outs, bias=bias) for outs in (32, 48, 64))
        self.aside = nn.Linear(96, 16, bias=bias)
        self.out = nn.Linear(144, 64, bias=bias)

    def forward(self, x):
        h = self.first(self.first(x)[..., :64].contiguous()) * 1.0
        parts = [self.q(h), self.k(h), self.v(h)]
        self.aside(h)
        return self.out(torch.cat(parts, -1)) + x


class Net(nn.Module):
    def __init__(self, bias=False, recompute=False):
        super().__init__()
        self.blocks = nn.ModuleList([Block(bias), Block(bias)])
        self.recompute = recompute

    def forward(self, x):
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
        return x


def train(monkeypatch, level, flat, *, bias=False, recompute=False, shape=(4, 32, 64), steps=4, **options):
    counts = {"flat": 0}
    whole = flat_linear.flat_call

    def counted(*args):
        out = whole(*args) if flat else None
        counts["flat"] += out is not None
        return out

    with monkeypatch.context() as patch:
        patch.setattr(linear, "flat_call", counted)
        torch.manual_seed(0)
        model = Net(bias, recompute).cuda()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        options = {"backend": "torch", **options}
        model, optimizer = prepare(model, optimizer, level, convert=None, graphs=False, **options)
        half = torch.float16 if level.startswith("fp16") else torch.bfloat16
        seen = []
        for step in range(steps):
            for micro in range(2):
                x = torch.randn(*shape, device="cuda", generator=torch.Generator("cuda").manual_seed(9 * step + micro))
                with torch.autocast("cuda", half):
                    out = model(x.requires_grad_())
                (out.float().square().mean() * 8).backward()
                seen += [out.detach().clone(), x.grad.clone()]
            seen += [torch.as_tensor(p.grad).float().clone() for p in model.parameters() if p.grad is not None]
            optimizer.step()
            optimizer.zero_grad()
        seen += [p.detach().float().clone() for p in model.parameters()]
    return seen, counts["flat"], model


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("groups", [False, True])
def test_equal_to_the_general_passes(monkeypatch, level, bias, recompute, groups):
    if not groups:  # layers with one input share its operand, and their gradients' sum
        monkeypatch.setattr(LayerGroup, "output", lambda *_: None)
    general, none, _ = train(monkeypatch, level, False, bias=bias, recompute=recompute)
    flat, some, _ = train(monkeypatch, level, True, bias=bias, recompute=recompute)
    assert none == 0 and some >= 24
    assert len(general) == len(flat)
    for a, b in zip(general, flat, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("shape", [(128, 64), (2, 2, 32, 64), (3, 5, 64)], ids=str)
def test_shapes(monkeypatch, shape):
    general, _, _ = train(monkeypatch, "bf16_with_fp8_mixed", False, shape=shape)
    flat, some, _ = train(monkeypatch, "bf16_with_fp8_mixed", True, shape=shape)
    assert (some > 0) == (shape != (3, 5, 64))  # rows that are padded
    assert all(torch.equal(a, b) for a, b in zip(general, flat, strict=True))


def ready(monkeypatch, **options):
    _, some, model = train(monkeypatch, "bf16_with_fp8_mixed", True, steps=2, **options)
    assert some
    return model


def both_ways(monkeypatch, model, use):
    """What ``use`` returns for a model whose layers are flat, and for a copy of the same state without."""
    found = []
    for flat in (True, False):
        with monkeypatch.context() as patch:
            if not flat:
                patch.setattr(linear, "flat_call", lambda *_: None)
            with torch.autocast("cuda", torch.bfloat16):
                found.append(use(model))
    return found


def leaf(seed=3):
    return torch.randn(4, 32, 64, device="cuda", generator=torch.Generator("cuda").manual_seed(seed)).requires_grad_()


def test_a_gradient_that_is_differentiated_again(monkeypatch):
    def penalty(model):
        x = leaf()
        (grad,) = torch.autograd.grad(model(x).float().square().sum(), x, create_graph=True)
        model.zero_grad()
        grad.square().sum().backward()
        return [p.grad for p in model.parameters() if p.grad is not None]

    flat, general = both_ways(monkeypatch, ready(monkeypatch), penalty)
    assert len(flat) == len(general) > 0
    assert all(torch.equal(a, b) for a, b in zip(flat, general, strict=True))


def test_gradients_of_some_inputs_alone(monkeypatch):
    def some(model):
        x = leaf()
        loss = model(x).float().square().sum()
        weight = model.blocks[1].q.weight
        return [*torch.autograd.grad(loss, weight, retain_graph=True), *torch.autograd.grad(loss, x)]

    flat, general = both_ways(monkeypatch, ready(monkeypatch), some)
    assert all(torch.equal(a, b) for a, b in zip(flat, general, strict=True))


def test_batched_gradients(monkeypatch):
    def batched(model):
        x = leaf()
        out = model(x)
        rows = torch.randn(3, *out.shape, device="cuda", generator=torch.Generator("cuda").manual_seed(1)).to(out.dtype)
        return torch.autograd.grad(out, x, rows, is_grads_batched=True)

    flat, general = both_ways(monkeypatch, ready(monkeypatch), batched)
    assert torch.equal(flat[0], general[0])


def test_a_weight_that_changes_before_backward_is_noticed(monkeypatch):
    model = ready(monkeypatch)
    with torch.autocast("cuda", torch.bfloat16):
        out = model(leaf())
        with torch.no_grad():
            for param in model.parameters():
                param.add_(1.0)
        model(leaf())
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.float().sum().backward()


def test_observers_see_every_operand(monkeypatch):
    class Count(Observer):
        def __init__(self):
            self.kinds = []

        def quantized(self, name, kind, values, operand, backend):
            self.kinds.append(kind)

    model, sees = ready(monkeypatch), Count()
    plan: GemmPlan = model.blocks[0].out.gemm_plan
    with plan.observers.watched_by(sees), torch.autocast("cuda", torch.bfloat16):
        model(leaf()).float().sum().backward()
    assert sees.kinds.count("input") >= sees.kinds.count("grad_output") > 0 and "weight" in sees.kinds


def test_evaluation_and_copies(monkeypatch):
    def evaluate(model):
        with torch.no_grad():
            return [model.eval()(leaf()).clone(), copy.deepcopy(model)(leaf()).clone()]

    flat, general = both_ways(monkeypatch, ready(monkeypatch), evaluate)
    assert all(torch.equal(a, b) for a, b in zip(flat, general, strict=True))

"""Layers that ``convert="auto"`` leaves, and the modules around them that have known them as layers in FP8."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from nemo_lowprec.chart.groups import LayerFilter
from nemo_lowprec.chart.recipe import Recipe
from nemo_lowprec.compute import ReferenceBackend, convert_layers, gemm_plans
from nemo_lowprec.compute.amaxes import AmaxState
from nemo_lowprec.compute.operands import new_histories
from nemo_lowprec.compute.producers import Reader, name_reader
from nemo_lowprec.compute.speed_filter import SpeedFilter
from nemo_lowprec.compute.split import SplitLinear
from nemo_lowprec.compute.weight_state import WeightStates
from nemo_lowprec.formats import E4M3
from nemo_lowprec.tensors import Fp8Weight, Fp16Weight
from tests.compute.test_qkv import KINDS, convert, model_of
from tests.compute.test_qkv import train as train_attention

HALF = torch.bfloat16
WIDTH, ROWS = 32, 16


class Producer(nn.Module):
    """Quantizes its result for the layer that reads it."""

    def __init__(self):
        super().__init__()
        self.reader, self.offered = Reader(), 0

    def forward(self, x):
        y, reader = torch.tanh(x).to(HALF), self.reader
        wants = reader.wants(len(y), HALF, self.training, torch.is_grad_enabled())
        name_reader(y, reader)
        if wants:
            how = {"rowwise": True, "columnwise": reader.columnwise, "record": reader.record}
            reader.offer(y, reader.backend.quantize(y.detach(), reader.operand, **how))
            self.offered += 1
        return y


class Block(nn.Module):
    """Two producers, of which q, k and v, and one layer read the results; ``between`` stands behind each of them."""

    def __init__(self, between=None):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = Producer(), Producer()
        self.q, self.k, self.v, self.up = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.between = between or (lambda y: y)

    def forward(self, x):
        y = self.between(self.first(x))
        x = x + torch.tanh(self.q(y) * self.k(y) + self.v(y))
        return x + self.up(self.between(self.second(x)))


def converted(between=None):
    block, recipe = Block(between), Recipe("delayed")
    histories = new_histories(recipe)
    convert_layers(block, HALF, recipe, ReferenceBackend(), None, LayerFilter(), histories)
    return block, histories


def inputs(step):
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(step)) * (step + 1)


def run(block, x):
    with torch.autocast("cpu", HALF):
        return block(x)


def train(block, histories, steps):
    """Outputs and gradients of all steps."""
    optimizer, found = torch.optim.SGD(block.parameters(), lr=0.05), []
    for step in range(steps):
        out = run(block, inputs(step))
        out.float().pow(2).mean().backward()
        found += [out.detach(), *(p.grad.clone() for p in block.parameters())]
        optimizer.step()
        optimizer.zero_grad()
        histories.update()
    return found


def leave(model, *names, weights=None):
    """What a GPU does: torch computes the layers."""
    SpeedFilter(model, None, weights or WeightStates(), weights is not None).leave(dict.fromkeys(names, "too small"))


@pytest.mark.parametrize("left,offers", [(("q",), 2), (("k",), 2), (("q", "k", "v"), 0)])
def test_a_producer_finds_the_layers_that_still_read_quantized_values(left, offers):
    block, histories = converted()
    train(block, histories, 3)
    assert block.first.offered == block.second.offered == 2  # of three steps; in the first one they learn who reads
    leave(block, *left)
    train(block, histories, 3)
    assert (block.first.offered, block.second.offered) == (2 + offers, 4)


def test_the_bits_are_those_of_a_model_in_which_nobody_offers():
    found = []
    for between in (None, torch.clone):
        block, histories = converted(between)
        first = train(block, histories, 3)
        leave(block, "q", "up")
        found.append(first + train(block, histories, 3))
    assert len(found[0]) == len(found[1]) and all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("kind", ["timm", "swin"])
def test_a_split_layer_that_is_left(kind):
    found = []
    for fused in (True, False):
        model = model_of(KINDS[kind])
        _, histories = convert(model, fused=fused)
        first = train_attention(model, histories, 2)
        leave(model, "1.qkv")
        found.append(first + train_attention(model, histories, 2))
        assert isinstance(model[1].qkv, SplitLinear) is fused
        assert gemm_plans(model[1].qkv)["weight"].recipe is None and gemm_plans(model[3].qkv)["weight"].any_fp8
    assert len(found[0]) == len(found[1]) and all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("kind", [Fp8Weight, Fp16Weight])
def test_a_low_bit_weight_is_cast_once_a_step(kind, monkeypatch):
    model = nn.Linear(32, 16, bias=False)
    values = model.weight.detach()
    model.weight = nn.Parameter(kind.from_float(values, *((E4M3, HALF) if kind is Fp8Weight else (HALF,))))
    state = AmaxState()
    state.weights.keeps = True
    convert_layers(
        model, HALF, Recipe("current"), ReferenceBackend(), None, LayerFilter("*"), None, weights=state.weights
    )
    leave(model, "", weights=state.weights)
    state.settle(torch.device("cpu"))
    casts, dequantize = [], kind.dequantize
    monkeypatch.setattr(kind, "dequantize", lambda self, dtype=None: casts.append(1) or dequantize(self, dtype))
    x = torch.randn(4, 32, dtype=HALF, requires_grad=True)

    def forward_and_backward():
        out = run(model, x)
        out.float().sum().backward()
        return out

    for _ in range(3):
        out = forward_and_backward()
    assert len(casts) == 1
    assert torch.equal(out, F.linear(x, dequantize(model.weight, HALF)))
    with torch.no_grad():
        model.weight.quantize_(values * 2)
    state.weights.renew()
    assert torch.equal(forward_and_backward(), F.linear(x, dequantize(model.weight, HALF))) and len(casts) == 2


def test_a_pass_that_has_begun_goes_on_as_it_began():
    grads = []
    for leaves in (False, True):
        block, histories = converted()
        train(block, histories, 2)
        out = run(block, inputs(5))
        if leaves:
            leave(block, "q", "k")
        out.sum().backward()
        grads.append(block.q.weight.grad.clone())
    assert torch.equal(*grads)

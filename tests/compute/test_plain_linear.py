"""Subclasses of ``nn.Linear``: those that compute x @ weight.T + bias are converted, and stay what they are."""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from support import assert_same
from torch import nn
from transformers import FalconConfig, FalconForCausalLM
from transformers.models.falcon.modeling_falcon import FalconLinear

from nemo_lowprec import prepare
from nemo_lowprec.chart.groups import LayerFilter
from nemo_lowprec.chart.recipe import Recipe
from nemo_lowprec.compute import LowPrecisionLinear, ReferenceBackend, convert_layers, revert_layers
from nemo_lowprec.compute.class_swap import kind_of
from nemo_lowprec.compute.half_linear import HalfLinear
from nemo_lowprec.compute.patterns.plain_linear import computes_linear
from nemo_lowprec.engine import Engine


class Times(nn.Linear):
    def forward(self, x):
        out = x @ self.weight.T
        return out if self.bias is None else out + self.bias


class OfAnotherShape(nn.Linear):
    def forward(self, hidden_states):
        rows = hidden_states.reshape(-1, self.in_features)
        out = rows.mm(self.weight.t()) if self.bias is None else torch.addmm(self.bias, rows, self.weight.t())
        return out.view(*hidden_states.shape[:-1], self.out_features)


class WithoutForward(nn.Linear):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.init = "default"


class Counts(nn.Linear):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.calls, self.count = [], 0

    def forward(self, input):
        self.calls.append(input.shape)
        self.count += 1
        return F.linear(input, self.weight, self.bias)


LINEAR = [FalconLinear, Times, OfAnotherShape, WithoutForward, Counts]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("cls", LINEAR)
def test_classes_that_compute_as_linear(cls, bias):
    assert computes_linear(cls(48, 16, bias=bias))
    assert computes_linear(cls(48, 16, bias=bias, dtype=torch.bfloat16))
    assert computes_linear(cls(48, 16, bias=bias, device="meta"))


class Noisy(nn.Linear):
    def forward(self, x):
        return super().forward(x + 1e-3 * torch.randn_like(x))


class Drops(nn.Linear):
    def forward(self, x):
        return F.dropout(super().forward(x), 0.01, self.training)


class NoisyInTraining(nn.Linear):
    def forward(self, x):
        return super().forward(x) * (1.001 if self.training else 1.0)


class Relu(nn.Linear):
    def forward(self, x):
        return super().forward(x).relu()


class Clamps(nn.Linear):
    def forward(self, x):
        return super().forward(x.clamp(-100, 100))


class Scales(nn.Linear):
    scale = 1.001

    def forward(self, x):
        return super().forward(x) * self.scale


class Adapter(nn.Linear):
    def __init__(self, ins, outs, **kwargs):
        super().__init__(ins, outs, **kwargs)
        self.a, self.b = nn.Parameter(torch.randn(4, ins)), nn.Parameter(torch.zeros(outs, 4))

    def forward(self, x):
        return super().forward(x) + x @ self.a.T @ self.b.T


class Child(nn.Linear):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.norm = nn.LayerNorm(16)

    def forward(self, x):
        return super().forward(x)


class Buffered(nn.Linear):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x):
        self.seen += 1
        return super().forward(x)


class Another(nn.Linear):
    def forward(self, x, scale=1.0):
        return super().forward(x) * scale


class Keywords(nn.Linear):
    def forward(self, x, **kwargs):
        return super().forward(x)


class Pair(nn.Linear):
    def forward(self, x):
        return super().forward(x), None


class InFP32(nn.Linear):
    def forward(self, x):
        return F.linear(x.float(), self.weight.float(), None if self.bias is None else self.bias.float())


class Quantizes(nn.Linear):
    def forward(self, x):
        return F.linear(x, self.weight.to(torch.float8_e4m3fn).to(x.dtype), self.bias)


class NoGradient(nn.Linear):
    def forward(self, x):
        return F.linear(x, self.weight.detach(), self.bias)


class Grouped(nn.Linear):
    def forward(self, x):
        weight = self.weight.view(2, -1, x.shape[-1])
        return torch.cat([x @ weight[0].T, x.flip(-1) @ weight[1].T], -1)


class Bias(nn.Linear):
    def forward(self, x):
        return F.linear(x, self.weight, None if self.bias is None else self.bias.abs())


class Called(nn.Linear):
    def __call__(self, x):
        return super().__call__(x) * 2


class Property(nn.Linear):
    @property
    def weight(self):
        if "weight" not in self._parameters:
            raise AttributeError("weight")
        return self._parameters["weight"] * 2


class Packed(nn.Parameter):
    """As the weights of bitsandbytes' layers, which no other code reads as a matrix."""


def packed(*args, **kwargs):
    layer = Times(*args, **kwargs)
    layer.weight = Packed(layer.weight.detach())
    return layer


OTHER = [
    Noisy, Drops, NoisyInTraining, Relu, Clamps, Scales, Adapter, Child, Buffered, Another, Keywords, Pair, InFP32,
    Quantizes, NoGradient, Grouped, Bias, Called, Property, packed,
]  # fmt: skip


@pytest.mark.parametrize("make", OTHER, ids=lambda make: make.__name__)
def test_classes_that_compute_something_else(make):
    model = nn.Sequential(nn.Linear(32, 32), make(32, 32, bias=True))
    kind = type(model[1])
    result = convert(model)
    assert result.low == ["0"] and type(model[1]) is kind
    assert result.kept == {"1": f"{kind.__name__} computes another function than x @ weight.T + bias"}


def convert(model, recipe=None, half_backend=None, **kwargs):
    recipe = recipe or Recipe("current")
    return convert_layers(
        model, torch.bfloat16, recipe, ReferenceBackend(), half_backend, LayerFilter(), None, **kwargs
    )  # fmt: skip


def test_modules_of_a_class_are_probed_by_their_attributes():
    class Switched(nn.Linear):
        def __init__(self, factor):
            super().__init__(32, 32)
            self.factor = factor

        def forward(self, x):
            return super().forward(x) * self.factor

    assert [computes_linear(Switched(factor)) for factor in (1.0, 2.0, 1.0, 2.0)] == [True, False, True, False]


class Attends(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = (Times(32, 32) for _ in range(3))

    def forward(self, x):
        return self.q(x) + self.k(x) * self.v(x)


def test_layers_that_read_one_tensor_compute_as_one():
    model = nn.Sequential(nn.Linear(32, 32), Attends(), nn.Linear(32, 32))
    optimizer = torch.optim.AdamW(model.parameters())
    model, optimizer = prepare(model, optimizer, "bf16_with_fp8_mixed", backend="reference", convert="*")
    for _ in range(3):
        model(torch.randn(16, 32)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert Engine.of(model).columns.computation.own_amaxes.groups == [("1.q", "1.k", "1.v")]


def test_the_probe_leaves_no_trace():
    layer = Counts(32, 32)
    layer.weight.grad = torch.ones(32, 32)
    state, random = {name: id(value) for name, value in layer.__dict__.items()}, torch.get_rng_state()
    values = copy.deepcopy(layer.state_dict())
    assert computes_linear(layer)
    assert layer.calls == [] and layer.count == 0 and layer.training
    assert {name: id(value) for name, value in layer.__dict__.items()} == state
    assert torch.equal(torch.get_rng_state(), random) and torch.equal(layer.weight.grad, torch.ones(32, 32))
    assert_same(dict(layer.state_dict()), dict(values))


@pytest.mark.parametrize("cls", LINEAR)
def test_a_converted_layer_stays_of_its_class_and_computes_as_nn_linear(cls):
    torch.manual_seed(0)
    plain = nn.Linear(32, 48)
    own = cls(32, 48)
    own.load_state_dict(plain.state_dict())
    x = torch.randn(8, 32)
    before = own(x)
    results = []
    for layer in (plain, own):
        model = nn.Sequential(layer)
        assert convert(model).low == ["0"]
        leaf = x.clone().requires_grad_()
        out = model(leaf)
        out.square().sum().backward()
        results.append({"out": out.detach(), "dx": leaf.grad, "dw": layer.weight.grad, "db": layer.bias.grad})
    assert_same(*results)
    assert isinstance(own, cls) and isinstance(own, LowPrecisionLinear) and kind_of(own) is LowPrecisionLinear
    assert not isinstance(own, Counts) or own.count == 1
    for twin in (copy.deepcopy(own), pickle.loads(pickle.dumps(own))):
        assert type(twin) is type(own) and torch.equal(twin(x), own(x))
    revert_layers(own)
    assert type(own) is cls and "gemm_plan" not in own.__dict__ and torch.equal(own(x), before)


def test_the_input_may_be_named():
    layer = OfAnotherShape(32, 32)
    convert(nn.Sequential(layer))
    x = torch.randn(4, 32)
    assert torch.equal(layer(hidden_states=x), layer(x)) and isinstance(layer, OfAnotherShape)


def test_layers_in_half_precision_are_of_their_class_too():
    model = nn.Sequential(Times(32, 32), Times(32, 40), FalconLinear(40, 32))
    convert(model, half_backend=ReferenceBackend())
    assert [kind_of(layer) for layer in model] == [LowPrecisionLinear] * 3
    model = nn.Sequential(FalconLinear(40, 32))
    convert(model, fp32_wgrad=True)
    assert kind_of(model[0]) is HalfLinear and isinstance(model[0], FalconLinear)


@pytest.mark.parametrize("compiled", [False, True])
def test_compiled_blocks(compiled):
    model = nn.Sequential(Times(32, 32), FalconLinear(32, 48))
    convert(model)
    torch.manual_seed(0)
    x = torch.randn(8, 32, requires_grad=True)
    run = torch.compile(model, backend="aot_eager", fullgraph=True) if compiled else model
    out = run(x)
    out.sum().backward()
    assert out.shape == (8, 48) and x.grad.abs().sum() > 0 and model[0].weight.grad.abs().sum() > 0


def falcon():
    torch.manual_seed(0)
    config = FalconConfig(vocab_size=64, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, bias=True)
    return FalconForCausalLM(config)


@pytest.mark.parametrize("level", ["bf16_with_fp8_mixed", "bf16_with_fp8_rowwise_mixed", "msamp_o2"])
def test_falcon_trains(level):
    tokens = torch.randint(64, (2, 16), generator=torch.Generator().manual_seed(0))
    losses = {}
    for name in ("fp32", level):
        model = falcon()
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        if name == level:
            names = [n for n, m in model.named_modules() if type(m) is FalconLinear]
            model, optimizer = prepare(model, optimizer, level, backend="reference", convert=None)
            conversion = Engine.of(model).columns.computation.conversion
            assert sorted(conversion.low) == sorted(names) and len(names) == 8
            fused = [name for name, pattern in conversion.fused.items() if pattern == "MLP"]
            assert len(fused) == (0 if "rowwise" in level else 2)  # it hands FP8 on by delayed scales
        losses[name] = []
        for _ in range(12):
            loss = model(tokens, labels=tokens).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses[name].append(loss.item())
    assert losses["fp32"][-1] < 0.7 * losses["fp32"][0]
    assert losses[level][-1] == pytest.approx(losses["fp32"][-1], rel=0.05)

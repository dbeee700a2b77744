"""A pattern computes a parent in another way over the same parameters, where a probe shows that it is the same."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from nemo_lowprec.chart import get_level
from nemo_lowprec.chart.groups import LayerFilter
from nemo_lowprec.chart.recipe import Recipe
from nemo_lowprec.compute import convert_layers, describe_layers, patterns, revert_layers
from nemo_lowprec.compute.class_swap import swap
from nemo_lowprec.compute.operands import new_histories
from nemo_lowprec.compute.patterns import Match, Pattern, run_with
from tests.support import Counting

HALF = torch.bfloat16


class GatedMLP(nn.Module):
    def __init__(self, activation=F.silu):
        super().__init__()
        self.gate, self.up = nn.Linear(32, 64, bias=False), nn.Linear(32, 64, bias=False)
        self.down = nn.Linear(64, 32, bias=False)
        self.activation = activation

    def forward(self, x):
        return self.down(self.activation(self.gate(x)) * self.up(x))


class FusedGatedMLP(GatedMLP):
    """Quantizes the product itself, as a kernel would that writes it, and hands it to the projection behind."""

    def forward(self, x):
        hidden = F.silu(self.gate(x)) * self.up(x)
        plan = self.down.gemm_plan
        rows = hidden.detach().reshape(-1, hidden.shape[-1]).to(plan.half)
        rows = F.pad(rows, (0, 0, 0, -rows.shape[0] % plan.backend.row_multiple))
        how = {"rowwise": True, "columnwise": torch.is_grad_enabled(), "record": self.training}
        operand = plan.operands["input"]
        data = self.backend.quantize(rows, operand, **how)
        plan.inputs.offer(plan.backend, hidden, data, operand, shape=tuple(rows.shape), dtype=plan.half, **how)
        self.calls.append(tuple(rows.shape))
        return self.down(hidden)


class Gated(Pattern):
    name = "gated MLP"

    def is_candidate(self, module):
        return {"gate", "up", "down"} <= set(module._modules)

    def recognise(self, module):
        generator = torch.Generator().manual_seed(0)
        x, gate, up, down = (torch.randn(size, generator=generator) for size in ((4, 6), (8, 6), (8, 6), (6, 8)))
        got = run_with(module, {"gate.weight": gate, "up.weight": up, "down.weight": down}, x)
        want = (F.silu(x @ gate.t()) * (x @ up.t())) @ down.t()
        if got is None or got.shape != want.shape or not torch.allclose(got, want, rtol=1e-3, atol=1e-4):
            return "it computes no SwiGLU"
        return Match(linears=("gate", "up", "down"))

    def apply(self, module, match, backend):
        swap(module, FusedGatedMLP, calls=[], backend=backend)


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    others = [pattern for pattern in patterns.PATTERNS if not pattern.is_parent]
    monkeypatch.setattr(patterns, "PATTERNS", [Gated(), *others])


def block(*activations):
    torch.manual_seed(0)
    mlps = [GatedMLP(activation) for activation in activations or (F.silu, F.silu)]
    return nn.Sequential(nn.LayerNorm(32), *mlps, nn.Linear(32, 32))


def convert(model, scaling="current", **layers):
    recipe, backend = Recipe(scaling), Counting()
    histories = new_histories(recipe)
    result = convert_layers(model, HALF, recipe, backend, None, LayerFilter(**layers), histories)
    return result, backend, histories


def train(model, histories, steps=3):
    """The outputs, and the gradients of the last step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    generator, outputs, grads = torch.Generator().manual_seed(1), [], []
    for step in range(steps):
        optimizer.zero_grad()
        x = (torch.randn(3, 7, 32, generator=generator) * (step + 1)).requires_grad_()
        with torch.autocast("cpu", HALF):
            out = model(x)
        out.float().pow(2).sum().backward()
        outputs.append(out.detach())
        grads = [x.grad, *(p.grad.clone() for p in model.parameters())]
        optimizer.step()
        if histories is not None:
            histories.update()
    return outputs + grads


@pytest.mark.parametrize("scaling", ["current", "delayed", "rowwise", "blockwise"])
def test_a_fused_parent_computes_the_bits_of_its_layers(scaling, monkeypatch):
    model, plain = block(), block()
    result, backend, histories = convert(model, scaling)
    monkeypatch.setattr(patterns, "PATTERNS", patterns.PATTERNS[1:])
    unfused, plain_backend, plain_histories = convert(plain, scaling)
    assert result.fused == {"1": "gated MLP", "2": "gated MLP"} and not unfused.fused
    assert (result.low, result.weights, result.norms, result.kept) == (
        unfused.low, unfused.weights, unfused.norms, unfused.kept
    )  # fmt: skip
    got, want = train(model, histories), train(plain, plain_histories)
    assert model[1].calls == 3 * [(32, 64)]
    assert all(torch.equal(g, w) for g, w in zip(got, want, strict=True))
    assert backend.inputs == plain_backend.inputs  # the producer quantizes in the place of the layer behind it
    if histories is not None:
        for name, operand in histories.state_dict()["operands"].items():
            other = plain_histories.state_dict()["operands"][name]
            assert all(torch.equal(*map(torch.as_tensor, (operand[k], other[k]))) for k in operand), name


def test_converting_changes_nothing_that_reverting_does_not_give_back():
    model = block()
    state = [(type(m), dict(m.__dict__)) for m in model.modules()]
    x = torch.randn(4, 32)
    want = model(x)
    convert(model)
    assert type(model[1]) is FusedGatedMLP and type(model[1].gate) is not nn.Linear
    revert_layers(model)
    assert [(type(m), dict(m.__dict__)) for m in model.modules()] == state
    assert torch.equal(model(x), want)


def test_another_function_of_the_same_layers_is_left_alone():
    model = block(F.silu, F.gelu)
    result, _, _ = convert(model)
    assert result.fused == {"1": "gated MLP"} and result.unfused == {"2": "it computes no SwiGLU"}
    assert type(model[2]) is GatedMLP and "2.gate" in result.low


def test_a_parent_whose_forward_was_replaced_is_left_alone():
    model = block()
    model[1].forward = lambda x: x
    result, _, _ = convert(model)
    assert result.unfused == {"1": "GatedMLP has a forward of its own"} and list(result.fused) == ["2"]


@pytest.mark.parametrize("layers", [{"skip": ["1.up"]}, {"skip": ["1"]}, {"convert": ["2", "0"]}])
def test_a_parent_is_fused_only_where_all_its_layers_are_converted(layers):
    model = block()
    result, _, _ = convert(model, **layers)
    assert list(result.fused) == ["2"] and "half precision" in result.unfused["1"]
    assert type(model[1]) is GatedMLP


def test_the_probe_touches_neither_the_module_nor_its_hooks():
    model, called = GatedMLP(), []
    model.gate.register_forward_hook(lambda *args: called.append(args))
    model.gate.weight.data.fill_(float("nan"))
    before = torch.get_rng_state()
    assert isinstance(Gated().recognise(model), Match)
    assert not called and model.training and torch.equal(torch.get_rng_state(), before)
    with torch.device("meta"):
        on_meta = GatedMLP()
    assert isinstance(Gated().recognise(on_meta), Match)
    model.register_parameter("scale", nn.Parameter(torch.ones(())))
    assert Gated().recognise(model) == "it computes no SwiGLU"


class NormThenGated(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.mlp = nn.RMSNorm(32), GatedMLP()

    def forward(self, x):
        return self.mlp(self.norm(x))


class NormAndGate(Pattern):
    """Of a parent: its norm, and the two projections behind it."""

    name = "norm and gate"

    def is_candidate(self, module):
        return type(module) is NormThenGated

    def recognise(self, module):
        return Match(linears=("mlp.gate", "mlp.up"), norms=("norm",))

    def apply(self, module, match, backend):
        swap(module, type(module), seen=True)


def test_what_is_part_of_a_matched_parent_is_not_matched_again(monkeypatch):
    model = nn.Sequential(NormThenGated())
    monkeypatch.setattr(patterns, "PATTERNS", [*patterns.PATTERNS, NormAndGate()])
    result, _, _ = convert(model)
    assert result.fused == {"0": "norm and gate"} and list(result.unfused) == ["0.mlp"]
    assert result.norms == ["0.norm"] and type(model[0].norm) is nn.RMSNorm and model[0].seen
    kept = nn.Sequential(NormThenGated())
    result, _, _ = convert(kept, skip=["0.norm"])
    assert result.fused == {"0.mlp": "gated MLP"} and result.kept == {"0.norm": "in skip"}


def test_the_table_of_layers_names_fused_parents_and_the_others():
    model = block(F.silu, F.gelu)
    result, _, _ = convert(model)
    table, problem = describe_layers(model, result, get_level("te_fp8"), "current, reference")
    assert "fused: gated MLP" in table and "computed layer by layer: it computes no SwiGLU" in table
    assert problem is None
    assert copy.deepcopy(model)[1].calls == []

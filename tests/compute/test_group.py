"""Layers that read one tensor compute as one: what is learned, the numbers, and when each layer computes by itself."""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from nemo_lowprec import prepare
from nemo_lowprec.compute import gemm_plans
from nemo_lowprec.compute.group import LayerGroups
from nemo_lowprec.engine import Engine
from nemo_lowprec.formats import compute_amax, compute_scale
from nemo_lowprec.formats.floats import E4M3, decode
from nemo_lowprec.observers import Observer
from nemo_lowprec.tensors import stored_data
from tests.support import assert_same

SIZE, ROWS = 32, 16
LEVELS = ["bf16_with_fp8_mixed", "msamp_o2"]
by_level = pytest.mark.parametrize("level", LEVELS)


class Attention(nn.Module):
    def __init__(self, bias=True, grouped=16):
        super().__init__()
        self.q = nn.Linear(SIZE, SIZE, bias=bias)
        self.k, self.v = (nn.Linear(SIZE, grouped, bias=bias) for _ in range(2))
        self.out = nn.Linear(SIZE, SIZE)

    def forward(self, x):
        q, k, v = self.q(x), self.k(x), self.v(x)
        return self.out(q.tanh() * (k * v).sigmoid().repeat(1, 1, SIZE // k.shape[-1]))


class Model(nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.first = nn.Linear(SIZE, SIZE)
        self.attention = Attention(**options)
        self.norm = nn.LayerNorm(SIZE)

    def forward(self, x):
        x = self.first(x)
        return x + self.attention(self.norm(x))


def made(level="bf16_with_fp8_mixed", kind=Model, **options):
    torch.manual_seed(0)
    model = kind(**options)
    return prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2), level, backend="reference")


def batch(seed=0):
    return torch.randn(2, ROWS, SIZE, generator=torch.Generator().manual_seed(seed))


def step(model, optimizer, seed=0, loss_of=lambda out: out.float().pow(2).mean()):
    """The loss, and the gradients by name."""
    with torch.autocast("cpu", torch.bfloat16):
        loss = loss_of(model(batch(seed)))
    loss.backward()
    grads = {name: p.grad.float().clone() for name, p in model.named_parameters() if p.grad is not None}
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach(), grads


def plans(model):
    return {plan.name: plan for module in model.modules() for plan in gemm_plans(module).values()}


def groups(model):
    return {plan.group.names for plan in plans(model).values() if plan.group is not None}


QKV = {("attention.q", "attention.k", "attention.v")}


@by_level
@pytest.mark.parametrize("bias", [True, False])
def test_a_step_is_that_of_single_layers_but_for_roundings(level, bias, monkeypatch):
    model, optimizer = made(level, bias=bias)
    found = [step(model, optimizer, seed) for seed in range(6)]
    assert groups(model) == QKV
    monkeypatch.setattr(LayerGroups, "_can", lambda *_: False)
    other, optimizer = made(level, bias=bias)
    want = [step(other, optimizer, seed) for seed in range(6)]
    assert not groups(other)
    assert_same([found[0]], [want[0]])  # the pass that learns
    for (loss, grads), (want_loss, want_grads) in zip(found[1:], want[1:], strict=True):
        torch.testing.assert_close(loss, want_loss, rtol=0.05, atol=0.0)
        assert grads.keys() == want_grads.keys()
        for name, grad in grads.items():
            assert grad.shape == want_grads[name].shape
            assert (grad - want_grads[name]).norm() < 0.3 * want_grads[name].norm() + 1e-6, name


def test_the_gradients_are_those_of_the_operands(monkeypatch):
    """Of quantized values with one scale, multiplied exactly."""
    model, optimizer = made()
    for seed in range(3):
        step(model, optimizer, seed)
    of = plans(model)["attention.q"]
    seen = {}

    def note(name, kind=None):
        whole = getattr(type(of.backend), name)

        def noting(self, values, operand, **how):
            made = whole(self, values, operand, **how)
            if kind is None or operand is of.operands[kind]:
                seen[name] = made
            return made

        monkeypatch.setattr(type(of.backend), name, noting)

    note("quantize_parts")
    note("quantize", "input")
    _, grads = step(model, optimizer, 3)
    dy8, sums = seen["quantize_parts"]
    dy, x = (q.columnwise.data.float() * q.columnwise.scale_inv for q in (dy8, seen["quantize"]))
    assert dy.shape == (SIZE + 2 * 16, 2 * ROWS) and x.shape == (SIZE, 2 * ROWS)
    weights = torch.cat([grads[f"attention.{name}.weight"] for name in "qkv"])
    torch.testing.assert_close(weights, dy @ x.t(), rtol=1e-5, atol=1e-8)
    biases = torch.cat([grads[f"attention.{name}.bias"] for name in "qkv"])
    torch.testing.assert_close(biases, sums, rtol=2**-8, atol=0.0)


@by_level
def test_weights_and_output_gradients_of_a_group_have_one_scale(level):
    model, optimizer = made(level)
    step(model, optimizer)
    of = [plans(model)[name] for name in sorted(next(iter(QKV)))]

    def assert_one_scale():
        weights = [stored_data(plan.weight.weight) for plan in of]
        want = compute_scale(torch.stack([compute_amax(w) for w in weights]).amax().reshape(1), E4M3.max, 0)
        for plan in of:
            assert torch.equal(plan.weight.scale, want)
            assert plan.operands["grad_output"].slot is model.attention.q.gemm_plan.operands["grad_output"].slot

    assert_one_scale()
    for seed in range(2):
        step(model, optimizer, seed)
        assert_one_scale()
    with torch.no_grad():
        stored_data(model.attention.v.weight).mul_(8)
    step(model, optimizer)
    assert_one_scale()
    model.eval()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        model(batch())
    assert_one_scale()


def test_a_model_that_is_settled_again_is_as_before():
    model, optimizer = made()
    for seed in range(2):
        step(model, optimizer, seed)
    computation = Engine.of(model).columns.computation
    of = plans(model)
    before = [(len(plan.weight.histories), plan.operands["grad_output"].slot) for plan in of.values()]
    for _ in range(2):
        computation.settle()
    assert groups(model) == QKV
    assert before == [(len(plan.weight.histories), plan.operands["grad_output"].slot) for plan in of.values()]
    step(model, optimizer)
    assert any(plan.weight._kept is not None for plan in of.values())
    computation._part()
    assert not groups(model)
    assert all(plan.weight._kept is None for plan in of.values() if plan.name in next(iter(QKV)))
    slots = computation.own_amaxes.histories.slots
    for name, plan in of.items():
        assert plan.operands["grad_output"].slot is slots[f"{name}.grad_output"]
        assert len(plan.weight.histories) == 2


def test_histories_go_on_for_each_layer():
    model, optimizer = made()
    for seed in range(3):
        step(model, optimizer, seed)
    histories = Engine.of(model).columns.computation.own_amaxes.histories
    at = {name: i for i, name in enumerate(histories.slots)}
    for kind in ("input", "grad_output"):
        q, k, v = (histories.history[:, at[f"attention.{name}.{kind}"]] for name in "qkv")
        assert torch.equal(q[1:3], k[1:3]) and torch.equal(q[1:3], v[1:3]) and q[1:3].min() > 0
    assert not any(slot.cold for slot in histories.slots.values())


@by_level
def test_a_saved_run_goes_on_bit_for_bit(level):
    model, optimizer = made(level)
    for seed in range(2):
        step(model, optimizer, seed)
    state = copy.deepcopy([model.state_dict(), optimizer.state_dict(), Engine.of(model).state_dict()])
    want = [step(model, optimizer, seed) for seed in range(2, 5)]
    other, optimizer = made(level)
    other.load_state_dict(state[0])
    optimizer.load_state_dict(state[1])
    Engine.of(other).load_state_dict(pickle.loads(pickle.dumps(state[2])))
    assert groups(other) == QKV
    assert_same([step(other, optimizer, seed) for seed in range(2, 5)], want)


class Conditional(Attention):
    """Calls its layers as ``how`` says."""

    how = "all"

    def forward(self, x):
        q = self.q(x)
        if self.how == "no k":
            return self.out(q)
        if self.how == "another tensor":
            return self.out(q.tanh() * (self.k(x * 2) * self.v(x)).sigmoid().repeat(1, 1, 2))
        if self.how == "written in between":
            q = q.clone()
            with torch.no_grad():
                x.add_(1.0)
        k, v = self.k(x), self.v(x)
        if self.how == "k is not used":
            k = torch.ones_like(k)
        return self.out(q.tanh() * (k * v).sigmoid().repeat(1, 1, 2))


class ConditionalModel(Model):
    def __init__(self):
        super().__init__()
        self.attention = Conditional()


@pytest.mark.parametrize("how", ["no k", "another tensor", "written in between", "k is not used"])
def test_layers_that_are_called_otherwise(how, monkeypatch):
    results = []
    for can in (True, False):
        if not can:
            monkeypatch.setattr(LayerGroups, "_can", lambda *_: False)
        model, optimizer = made(kind=ConditionalModel)
        losses = [step(model, optimizer)[0] for _ in range(3)]
        model.attention.how = how
        for _ in range(4):
            loss, grads = step(model, optimizer)
            losses.append(loss)
        results.append((losses, grads))
        stays = {"k is not used": QKV, "written in between": {("attention.k", "attention.v")}}
        assert groups(model) == (stays.get(how, set()) if can else set())
    (losses, grads), (want, want_grads) = results
    torch.testing.assert_close(torch.stack(losses), torch.stack(want), rtol=0.05, atol=0.0)
    assert grads.keys() == want_grads.keys()


def test_hooks_frozen_layers_and_accumulation():
    model, optimizer = made()
    for seed in range(2):
        step(model, optimizer, seed)
    called = []
    model.attention.k.register_forward_hook(lambda m, args, out: called.append(out.shape))
    model.attention.v.weight.requires_grad_(False)
    model.attention.k.bias.requires_grad_(False)
    with torch.autocast("cpu", torch.bfloat16):
        for _ in range(2):
            model(batch()).float().pow(2).mean().backward()
    assert called == [(2, ROWS, 16)] * 2
    assert model.attention.v.weight.grad is None and model.attention.k.bias.grad is None
    twice = model.attention.q.weight.grad.clone()
    optimizer.zero_grad()
    with torch.autocast("cpu", torch.bfloat16):
        model(batch()).float().pow(2).mean().backward()
    torch.testing.assert_close(twice, 2 * model.attention.q.weight.grad, rtol=0.02, atol=1e-6)


class Adapted(nn.Module):
    """As an adapter puts itself around a layer."""

    def __init__(self, base):
        super().__init__()
        self.base, self.a = base, nn.Linear(SIZE, 16, bias=False)
        self.b = nn.Linear(16, base.out_features, bias=False)

    def forward(self, x):
        return self.base(x) + self.b(self.a(x))


def test_adapters_are_not_with_the_frozen_layers():
    torch.manual_seed(0)
    model = Model()
    for name in "qkv":
        layer = getattr(model.attention, name).requires_grad_(False)
        setattr(model.attention, name, Adapted(layer))
    trained = [p for p in model.parameters() if p.requires_grad]
    model, optimizer = prepare(model, torch.optim.AdamW(trained, lr=1e-2), "bf16_with_fp8_mixed", backend="reference")
    seen = []
    for seed in range(4):
        _, grads = step(model, optimizer, seed)
        seen.append(set(grads))
    assert groups(model) == {
        ("attention.q.base", "attention.k.base", "attention.v.base"),
        ("attention.q.a", "attention.k.a", "attention.v.a"),
    }
    assert all(names == seen[0] for names in seen) and "attention.q.base.weight" not in seen[0]


def test_biases_of_some():
    """As Whisper's keys, which have none."""
    found = []
    for fill in (False, True):
        torch.manual_seed(0)
        model = Model()
        model.attention.k.bias = nn.Parameter(torch.zeros(16), requires_grad=False) if fill else None
        trained = [p for p in model.parameters() if p.requires_grad]
        model, optimizer = prepare(model, torch.optim.SGD(trained, lr=0.1), "bf16_with_fp8_mixed", backend="reference")
        found.append([step(model, optimizer, seed) for seed in range(4)])
        assert groups(model) == QKV
    assert_same(found[0], found[1])


def test_outputs_have_memory_of_their_own():
    """Of which what is not read again is free, and which may be written to."""
    model, optimizer = made()
    step(model, optimizer)
    with torch.autocast("cpu", torch.bfloat16):
        x = model.norm(model.first(batch()))
        q, k, v = (layer(x) for layer in (model.attention.q, model.attention.k, model.attention.v))
    assert groups(model) == QKV and {type(node.grad_fn).__name__ for node in (q, k, v)} == {"GroupFunctionBackward"}
    assert len({t.untyped_storage().data_ptr() for t in (q, k, v)}) == 3 and v.is_contiguous()
    before, kept = k.clone(), v.clone()
    k += 1.0
    assert torch.equal(k, before + 1) and torch.equal(v, kept)
    (q.float().sum() + k.float().pow(2).sum() + v.float().sum()).backward()
    assert model.attention.k.weight.grad is not None


def test_second_derivatives(monkeypatch):
    found = []
    for can in (True, False):
        if not can:
            monkeypatch.setattr(LayerGroups, "_can", lambda *_: False)
        model, optimizer = made()
        step(model, optimizer)
        x = batch(1).requires_grad_()
        with torch.autocast("cpu", torch.bfloat16):
            (dx,) = torch.autograd.grad(model(x).float().pow(2).mean(), x, create_graph=True)
        dx.float().pow(2).sum().mul(ROWS).backward()
        found.append([dx.detach(), x.grad, *(p.grad for p in model.parameters())])
        assert bool(groups(model)) == can
    for got, want in zip(*found, strict=True):
        assert (got - want).norm() < 0.2 * want.norm() + 1e-6


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("waiting", [1, 3])
def test_recomputed_blocks(reentrant, waiting):
    class Recomputed(Model):
        def forward(self, x):
            x = self.first(x)
            return x + checkpoint(self._block, x, use_reentrant=reentrant)

        def _block(self, x):
            return self.attention(self.norm(x))

    def passes(model, optimizer, seed):
        """Forward passes that wait for one backward pass."""
        with torch.autocast("cpu", torch.bfloat16):
            losses = [model(batch(seed + i)).float().pow(2).mean() for i in range(waiting)]
        sum(losses).backward()
        optimizer.step()
        optimizer.zero_grad()
        return [loss.detach() for loss in losses]

    plain, recomputed = made(), made(kind=Recomputed)
    for seed in range(5):
        assert passes(*recomputed, seed) == passes(*plain, seed)
    assert groups(recomputed[0]) == groups(plain[0]) == QKV


class Seeing(Observer):
    """The operands of each layer, as they are stored, and the relative errors of their values."""

    def __init__(self):
        self.seen, self.errors = {}, []

    def quantized(self, layer, kind, values, operand, backend):
        part, columnwise = backend.stored(operand)
        stored = decode(part.data) * part.scale_inv
        stored = stored.t() if columnwise else stored
        self.seen[layer, kind] = stored.clone()
        self.errors.append(float((stored - values.float()).norm() / values.float().norm()))


@by_level
def test_an_observed_pass_is_the_same_pass_and_tells_of_each_layer(level):
    """The operands of a group are announced by layer, with the scales that the layers share."""
    found, seeing = [], Seeing()
    for observed in (False, True):
        model, optimizer = made(level)
        for seed in range(3):
            step(model, optimizer, seed)
        if observed:
            Engine.of(model).observers.add(seeing)
        found.append([step(model, optimizer, seed) for seed in range(3, 6)])
        assert groups(model) == QKV
    assert_same(*found)
    names = {f"attention.{name}" for name in ("q", "k", "v", "out")}
    assert {(layer, kind) for layer, kind in seeing.seen if layer in names} == {
        (layer, kind) for layer in names for kind in ("input", "weight", "grad_output")
    }
    for kind, shape in (("input", (2 * ROWS, SIZE)), ("weight", (16, SIZE)), ("grad_output", (2 * ROWS, 16))):
        assert seeing.seen["attention.v", kind].shape == shape
    assert torch.equal(seeing.seen["attention.q", "input"], seeing.seen["attention.k", "input"])
    assert 0 < max(seeing.errors) < 0.08  # E4M3 and E5M2 round to 2**-4 and 2**-3


@pytest.mark.parametrize("kind", ["deepcopy", "pickle", "eval"])
def test_each_layer_computes_by_itself(kind):
    model, optimizer = made()
    step(model, optimizer)
    assert groups(model) == QKV
    if kind in ("deepcopy", "pickle"):
        other = copy.deepcopy(model) if kind == "deepcopy" else pickle.loads(pickle.dumps(model))
        assert not groups(other)
    else:
        other = model.eval()
    with torch.autocast("cpu", torch.bfloat16):
        x = model.norm(model.first(batch()))
        q = other.attention.q(x) if kind != "eval" else torch.no_grad()(other.attention.q)(x)
    assert type(q.grad_fn).__name__ == ("NoneType" if kind == "eval" else "LinearFunctionBackward")


@by_level
def test_compiled_code_computes_each_layer_by_itself(level):
    """With the scales of the group, and alike within the rounding of sums."""
    torch._dynamo.reset()
    losses = []
    for compiled in (False, True):
        model, optimizer = made(level)
        for seed in range(2):
            step(model, optimizer, seed)
        assert groups(model) == QKV
        if compiled:
            model.attention.compile(backend="aot_eager", fullgraph=True)
        losses.append([step(model, optimizer, seed)[0] for seed in range(2, 6)])
    torch._dynamo.reset()
    assert losses[0][0] == losses[1][0]  # the pass before the first gradients that differ
    torch.testing.assert_close(*map(torch.stack, losses), rtol=0.02, atol=0.0)


@pytest.mark.parametrize("level", ["bf16_with_fp8_current_scaling_mixed", "msamp_o3"])
def test_levels_whose_layers_stay_single(level):
    model, optimizer = made(level)
    for seed in range(3):
        step(model, optimizer, seed)
    assert not groups(model)


class Gated(nn.Module):
    def __init__(self, gate_first=True):
        super().__init__()
        self.gate_first = gate_first
        self.gate_proj, self.up_proj = nn.Linear(SIZE, 48, bias=False), nn.Linear(SIZE, 48, bias=False)
        self.down_proj, self.act = nn.Linear(48, SIZE, bias=False), nn.SiLU()

    def forward(self, x):
        if self.gate_first:
            return self.down_proj(self.act(self.gate_proj(x)) * self.up_proj(x))
        return self.down_proj(self.up_proj(x) * self.act(self.gate_proj(x)))


class Outer(nn.Module):
    def __init__(self, gate_first=True):
        super().__init__()
        self.first, self.mlp = nn.Linear(SIZE, SIZE), Gated(gate_first)

    def forward(self, x):
        return self.mlp(F.relu(self.first(x)))


@pytest.mark.parametrize("gate_first", [True, False])
@pytest.mark.parametrize("hooked", [False, True])
def test_gate_and_up(gate_first, hooked, monkeypatch):
    found = []
    for can in (True, False):
        if not can:
            monkeypatch.setattr(LayerGroups, "_can", lambda *_: False)
        model, optimizer = made(kind=Outer, gate_first=gate_first)
        if hooked:
            model.mlp.up_proj.register_forward_hook(lambda *_: None)
        found.append([step(model, optimizer, seed) for seed in range(5)])
        assert {len(names) for names in groups(model)} == ({2} if can else set())
    for (loss, grads), (want, want_grads) in zip(*found, strict=True):
        torch.testing.assert_close(loss, want, rtol=0.05, atol=0.0)
        for name, grad in grads.items():
            assert (grad - want_grads[name]).norm() < 0.3 * want_grads[name].norm() + 1e-6, name

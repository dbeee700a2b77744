"""A layer whose output is split into queries, keys and values gets their gradients joined, and quantized, at once."""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from nemo_lowprec.compute import LowPrecisionLinear, ReferenceBackend, revert_layers
from nemo_lowprec.compute.patterns.split import Split
from nemo_lowprec.compute.producers import GradReader
from nemo_lowprec.compute.split import LayerOutput, Parts, SplitLinear, as_layer_output
from tests.attention_models import Attention, Window, convert_without

HALF = torch.bfloat16


class TokensFirst(Attention):
    """The parts are taken without a permutation, or unpacked."""

    def forward(self, x):
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, -1, 16).unbind(dim=-3)
        x = F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v)))
        return self.proj(x.transpose(1, 2).flatten(2))


class Unpacked(Attention):
    def forward(self, x):
        q, k, v = self.qkv(x).reshape(*x.shape[:2], 3, 3, 16).permute((2, 0, 3, 1, 4))
        return self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Chunked(Attention):
    """A split of another kind."""

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (3, 16)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        return self.proj(F.scaled_dot_product_attention(q, k, v).permute(0, 2, 1, 3).flatten(2))


KINDS = {
    "timm": Attention, "timm, norms": lambda: Attention(qk_norm=True), "timm, unfused": lambda: Attention(fused=False),
    "swin": Window, "tokens first": TokensFirst, "unpacked": Unpacked,
}  # fmt: skip


def model_of(kind):
    torch.manual_seed(0)
    return nn.Sequential(nn.LayerNorm(48), kind(), nn.LayerNorm(48), kind())


def convert(model, fused=True, **options):
    return convert_without(None if fused else Split, model, HALF, **options)


def train(model, histories, steps=3, how=lambda f, x: f(x), **autocast):
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    seen = []
    for step in range(steps):
        optimizer.zero_grad()
        x = torch.randn(2, 16, 48, generator=torch.Generator().manual_seed(step), requires_grad=True)
        with torch.autocast("cpu", HALF, **autocast):
            out = how(model, x)
        out.float().pow(2).sum().backward()
        seen += [out.detach(), x.grad, *(p.grad.clone() for p in model.parameters())]
        optimizer.step()
        if histories is not None:
            histories.update()
            seen += [histories.history.clone(), histories.scale.clone()]
    return seen


def assert_same(got, want):
    assert len(got) == len(want)
    for g, w in zip(got, want, strict=True):
        assert g.dtype == w.dtype and torch.equal(g, w)


@pytest.fixture
def offers(monkeypatch):
    made = []
    whole = GradReader.offer

    def offer(reader, grad, data, sums):
        if data is not None:
            made.append(grad.shape)
        whole(reader, grad, data, sums)

    monkeypatch.setattr(GradReader, "offer", offer)
    return made


@pytest.fixture
def gradients(monkeypatch):
    """Counts the output gradients that layers quantize themselves, and those that are made for them."""
    seen = {"own": 0, "joined": 0}
    own, joined = ReferenceBackend.quantize_grad, ReferenceBackend.join_gradients

    def join(*args, **kwargs):
        seen["joined"] += 1
        seen["own"] -= 1  # the reference joins, and then quantizes as ever
        return joined(*args, **kwargs)

    def quantize(*args, **kwargs):
        seen["own"] += 1
        return own(*args, **kwargs)

    monkeypatch.setattr(ReferenceBackend, "join_gradients", join)
    monkeypatch.setattr(ReferenceBackend, "quantize_grad", quantize)
    return seen


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_trains_to_the_same_bits_and_quantizes_once(kind, gradients):
    model = model_of(KINDS[kind])
    plain = copy.deepcopy(model)
    (result, histories), (_, plain_histories) = convert(model), convert(plain, fused=False)
    assert result.fused == dict.fromkeys(("1", "3"), "split of queries, keys and values")
    assert type(model[1].qkv) is SplitLinear and type(model[1].proj) is LowPrecisionLinear
    got = train(model, histories)
    # Two layers, three steps, of which the first has no history; proj quantizes its gradient in each step.
    assert gradients == {"own": 2 * 3 + 2, "joined": 2 * 2}
    assert_same(got, train(plain, plain_histories))


@pytest.mark.parametrize("scaling", ["current", "rowwise", "blockwise"])
def test_scalings_without_a_scale_at_hand(scaling):
    model = model_of(Attention)
    plain = copy.deepcopy(model)
    convert(model, scaling=scaling), convert(plain, fused=False, scaling=scaling)
    assert_same(train(model, None), train(plain, None))


def test_without_autocast(offers):
    model = model_of(Attention)
    plain = copy.deepcopy(model)
    (_, histories), (_, plain_histories) = convert(model), convert(plain, fused=False)
    assert_same(train(model, histories, enabled=False), train(plain, plain_histories, enabled=False))
    assert not offers  # the gradients are FP32


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing(reentrant, offers):
    model = model_of(Attention)
    plain = copy.deepcopy(model)
    (_, histories), (_, plain_histories) = convert(model), convert(plain, fused=False)

    def how(f, x):
        return checkpoint(f, x, use_reentrant=reentrant)

    assert_same(train(model, histories, how=how), train(plain, plain_histories, how=how))
    assert len(offers) == 2 * 2


def test_dropout_evaluation_and_a_mask_are_the_modules_own():
    model = nn.ModuleList([Attention(drop=0.5)])
    plain = copy.deepcopy(model)
    convert(model), convert(plain, fused=False)
    mask = torch.ones(16, 16, dtype=torch.bool).tril()
    x = torch.randn(2, 16, 48)
    for training in (True, False):
        outs = []
        for m in (model, plain):
            torch.manual_seed(1)
            outs.append(m.train(training)[0](x, mask))
        assert torch.equal(*outs)


def test_other_splits_are_left_alone():
    model = model_of(Chunked)
    result, _ = convert(model)
    assert not result.fused and not result.unfused and type(model[1].qkv) is LowPrecisionLinear
    result, _ = convert(model_of(Attention), skip=["1.qkv"])
    assert list(result.fused) == ["3"] and "1.qkv is in half precision" in result.unfused["1"]


def test_looking_leaves_module_hooks_and_random_state_alone():
    model, called = Attention(), []
    model.qkv.register_forward_hook(lambda *args: called.append(args))
    before, state = torch.get_rng_state(), dict(model.__dict__)
    assert Split().is_candidate(model)
    assert not called and torch.equal(torch.get_rng_state(), before) and dict(model.__dict__) == state
    assert model._modules["qkv"].weight.device.type == "cpu"
    with torch.device("meta"):
        assert Split().is_candidate(Window())


def test_reverting_copies_and_pickles():
    model = model_of(Attention)
    state = [(type(m), dict(m.__dict__)) for m in model.modules()]
    convert(model)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert type(twin[1].qkv) is SplitLinear
        assert_same(train(twin, None, 1), train(copy.deepcopy(model), None, 1))
    revert_layers(model)
    assert [(type(m), dict(m.__dict__)) for m in model.modules()] == state


def test_compiled_code_sees_plain_tensors():
    model = model_of(Attention)
    _, histories = convert(model)
    train(model, histories, 2)
    x = torch.randn(2, 16, 48)
    want = model(x)
    torch._dynamo.reset()
    got = torch.compile(model, backend="aot_eager", fullgraph=True)(x)
    got.sum().backward()
    torch.testing.assert_close(got, want, rtol=5e-2, atol=5e-2)


def test_hooks_see_every_gradient_and_may_change_it(gradients):
    results = []
    for fused in (True, False):
        model = nn.ModuleList([Attention()])
        model.load_state_dict(torch.load(*_saved()))
        _, histories = convert(model, fused)
        for step in range(2):
            layer, seen = model[0].qkv, []
            handle = layer.register_forward_hook(lambda m, a, out, seen=seen: _watch(out, seen))
            x = torch.randn(2, 16, 48, generator=torch.Generator().manual_seed(step), requires_grad=True)
            with torch.autocast("cpu", HALF):
                out = model[0](x)
            model.zero_grad()
            out.float().sum().backward()
            handle.remove()
            histories.update()
        results.append([*seen, x.grad, layer.weight.grad, layer.bias.grad])
    assert_same(*results)


def _saved():
    import io

    torch.manual_seed(0)
    file = io.BytesIO()
    torch.save(nn.ModuleList([Attention()]).state_dict(), file)
    file.seek(0)
    return (file,)


def _watch(out, seen):
    def double(grad):
        seen.append(grad.clone())
        return grad * 2

    out.register_hook(double)


def test_second_derivatives():
    results = []
    for fused in (True, False):
        torch.manual_seed(0)
        model = nn.ModuleList([Attention(fused=False)])
        convert(model, fused)
        x = torch.randn(2, 16, 48, requires_grad=True)
        (first,) = torch.autograd.grad(model[0](x).pow(2).sum(), x, create_graph=True)
        first.pow(2).sum().backward()
        results.append([first.detach(), x.grad, *(p.grad for p in model.parameters())])
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-3 * want.abs().max().item())


def output():
    generator = torch.Generator().manual_seed(0)
    source = torch.randn(2, 5, 24, generator=generator, requires_grad=True)
    return source, as_layer_output((source * 1).contiguous(), ReferenceBackend())


def test_a_layer_output_is_like_any_tensor():
    _, out = output()
    assert type(out) is LayerOutput and isinstance(out, torch.Tensor)
    for other in (out + 1, out.view(2, -1), out.transpose(0, 1), out[0], torch.cat([out, out]), out.detach()):
        assert type(other) is torch.Tensor
    assert type(out.reshape(2, 5, 4, 3, 2)) is torch.Tensor and type(out.view(torch.int32)) is torch.Tensor
    parts = out.reshape(2, 5, 3, 4, 2)
    assert type(parts) is Parts and type(parts.sum(0)) is torch.Tensor and type(parts[:, 0]) is torch.Tensor
    assert torch.equal(parts.permute(2, 0, 3, 1, 4)[1], out.detach().view(2, 5, 3, 4, 2)[:, :, 1].transpose(1, 2))
    rows = parts.unbind(0)
    assert len(rows) == 2 and torch.equal(rows[1], parts[1])
    with torch.no_grad():
        assert len(parts.unbind(2)) == 3 and parts.unbind(2)[0].grad_fn is None


@pytest.mark.parametrize("order", [(2, 0, 3, 1, 4), (0, 1, 2, 3, 4), (4, 2, 1, 0, 3), (0, 2, 3, 1, 4)])
def test_gradients_of_any_order_of_dimensions_and_of_some_parts_alone(order):
    for used in ((0, 1, 2), (1,), (0, 2)):
        grads = []
        for plain in (True, False):
            source, out = output()
            shaped = torch.Tensor.view(out, 2, 5, 3, 4, 2) if plain else out.view(2, 5, 3, 4, 2)
            parts = shaped.permute(order).unbind(order.index(2))
            sum((parts[i] * (i + 2)).pow(2).sum() for i in used).backward()
            grads.append(source.grad)
        assert_same(grads[:1], grads[1:])


def test_a_part_that_is_changed_in_place_and_read_again():
    grads = []
    for plain in (True, False):
        source, out = output()
        shaped = torch.Tensor.view(out, 2, 5, 3, 4, 2) if plain else out.view(2, 5, 3, 4, 2)
        parts = shaped.permute(2, 0, 3, 1, 4)
        parts[0].mul_(3)
        (parts[0] * parts[1] * parts[2]).sum().backward()
        grads.append(source.grad)
    assert_same(grads[:1], grads[1:])


def test_a_gradient_that_a_hook_changes_is_quantized_by_the_layer():
    """From the first pass on, so that no amax of the gradient before is recorded."""

    class Hooked(Attention):
        def forward(self, x):
            shaped = self.qkv(x).reshape(*x.shape[:2], 3, 3, 16)
            if shaped.requires_grad:
                shaped.register_hook(lambda grad: grad * 2)
            q, k, v = shaped.permute(2, 0, 3, 1, 4).unbind(0)
            return self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))

    model = model_of(Hooked)
    plain = copy.deepcopy(model)
    (_, histories), (_, plain_histories) = convert(model), convert(plain, fused=False)
    assert_same(train(model, histories), train(plain, plain_histories))
    assert not any(layer.gemm_plan.operands["grad_output"].direct for layer in (model[1].qkv, model[3].qkv))

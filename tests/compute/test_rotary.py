"""Rotary embeddings in one pass: known by what they compute, and bit for bit what the models' own functions give."""

import copy
import functools
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    GlmConfig,
    GPTNeoXConfig,
    LlamaConfig,
    PhiConfig,
    Qwen3Config,
)
from transformers.models.llama import modeling_llama
from transformers.models.olmo import modeling_olmo
from transformers.models.qwen2_vl import modeling_qwen2_vl

from nemo_lowprec.compute import revert_layers
from nemo_lowprec.compute.patterns.rotary import Rotary, form_of, fused_class
from nemo_lowprec.compute.rotary import FusedRotary
from tests.attention_models import convert_without

HALF = torch.bfloat16
SIZES = {
    "vocab_size": 64, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
}  # fmt: skip
GROUPED = {**SIZES, "num_key_value_heads": 2}
MODELS = {
    "llama": LlamaConfig(**GROUPED),
    "qwen3": Qwen3Config(**GROUPED, head_dim=16),
    "phi, a part": PhiConfig(**SIZES, partial_rotary_factor=0.5),
    "neox, a part": GPTNeoXConfig(**SIZES, rotary_pct=0.25),
    "glm, interleaved": GlmConfig(**GROUPED, head_dim=16, pad_token_id=0),
    "cohere, interleaved": CohereConfig(**GROUPED, pad_token_id=0),
}
TOKENS = torch.arange(26).view(2, 13)


def model_of(name, half=True):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(MODELS[name], attn_implementation="sdpa")
    return model.to(HALF) if half else model


def convert(model, fused=True, **options):
    return convert_without(None if fused else Rotary, model, HALF, **options)


def train(model, histories, steps=3):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen = []
    for _ in range(steps):
        optimizer.zero_grad()
        with torch.autocast("cpu", HALF):
            out = model(input_ids=TOKENS, labels=TOKENS)
        out.loss.backward()
        seen += [out.logits.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
        optimizer.step()
        histories.update()
    return seen


def assert_same(got, want):
    assert len(got) == len(want)
    for g, w in zip(got, want, strict=True):
        assert g.dtype == w.dtype and torch.equal(g, w)


@pytest.mark.parametrize("half", [True, False], ids=["half weights", "FP32 weights"])
@pytest.mark.parametrize("name", MODELS)
def test_a_model_trains_to_the_same_bits(name, half, monkeypatch):
    model = model_of(name, half)
    plain = copy.deepcopy(model)
    (result, histories), (_, plain_histories) = convert(model), convert(plain, fused=False)
    assert len([n for n, pattern in result.fused.items() if pattern == "rotary embedding"]) == 2
    calls = []
    whole = FusedRotary.__call__
    monkeypatch.setattr(FusedRotary, "__call__", lambda *args, **kw: calls.append(1) or whole(*args, **kw))
    got = train(model, histories)
    assert len(calls) == 3 * 2
    assert_same(got, train(plain, plain_histories))


def inputs(axis=1, heads=(4, 2), dim=16, rotary=16, half=HALF, factors=HALF, batches=2):
    generator = torch.Generator().manual_seed(1)

    def random(*shape):
        return torch.randn(shape, generator=generator)

    tensors = []
    for number in heads:  # as projections give them: views of [batch, seq, heads * dim]
        x = random(2, 5, number * dim).to(half).requires_grad_()
        tensors.append(x.view(2, 5, number, dim) if axis == 2 else x.view(2, 5, number, dim).transpose(1, 2))
    return tensors, random(batches, 5, rotary).to(factors), random(batches, 5, rotary).to(factors)


FUNCTIONS = {
    "llama": modeling_llama.apply_rotary_pos_emb,
    "olmo": modeling_olmo.apply_rotary_pos_emb,
    "vision": modeling_qwen2_vl.apply_rotary_pos_emb_vision,
}


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("mixed", [False, True], ids=["half cos", "FP32 cos"])
@pytest.mark.parametrize("batches", [1, 2])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_results_and_gradients_are_the_functions_and_lie_as_the_projections_do(name, half, mixed, batches):
    function = FUNCTIONS[name]
    axes = (2,) if name == "vision" else (1, 2)
    fused = FusedRotary(function, form_of(function))
    for axis in axes:
        tensors, cos, sin = inputs(axis, half=half, factors=torch.float32 if mixed else half, batches=batches)
        how = {} if name == "vision" else {"unsqueeze_dim": axis}
        got, want = fused(*tensors, cos, sin, **how), function(*tensors, cos, sin, **how)
        assert type(got) is tuple
        assert_same(got, want)
        dy = [torch.randn_like(w) for w in want]
        grads = torch.autograd.grad(got, tensors, dy)
        assert_same(grads, torch.autograd.grad(want, tensors, dy))
        for t in (*got, *grads):
            rows = t if axis == 2 else t.transpose(1, 2)
            assert rows.is_contiguous() and rows.flatten(2)._base is not None


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_under_autocast_results_are_rounded_as_attention_would_round_them(name, half):
    function = FUNCTIONS[name]
    fused = FusedRotary(refuse, form_of(function))
    tensors, cos, sin = inputs(1 if name != "vision" else 2, half=half, factors=torch.float32)
    with torch.autocast("cpu", half):
        got, want = fused(*tensors, cos, sin), [t.to(half) for t in function(*tensors, cos, sin)]
    assert_same(got, want)
    dy = [torch.randn_like(w) for w in want]
    assert_same(torch.autograd.grad(got, tensors, dy), torch.autograd.grad(want, tensors, dy))
    with torch.autocast("cpu", torch.float16 if half == torch.bfloat16 else torch.bfloat16):
        other = fused(*tensors, cos, sin)
    assert [t.dtype for t in other] == [t.dtype for t in function(*tensors, cos, sin)]


def test_tensors_without_a_batch():
    function = modeling_qwen2_vl.apply_rotary_pos_emb_vision
    tensors, cos, sin = inputs(2)
    args = [*(t[0] for t in tensors), cos[0], sin[0]]
    assert_same(FusedRotary(refuse, form_of(function))(*args), function(*args))


def refuse(*args, **kwargs):
    raise AssertionError("not fused")


def test_a_gradient_of_one_result_alone_and_one_of_any_strides():
    fused = FusedRotary(refuse, form_of(modeling_llama.apply_rotary_pos_emb))
    tensors, cos, sin = inputs()
    q, k = fused(*tensors, cos, sin)
    wq, wk = modeling_llama.apply_rotary_pos_emb(*tensors, cos, sin)
    assert_same(torch.autograd.grad(q.sum(), tensors[:1]), torch.autograd.grad(wq.sum(), tensors[:1]))
    dy = torch.randn(2, 5, 16, 2, dtype=HALF).permute(0, 3, 1, 2)
    assert_same(torch.autograd.grad(k, tensors[1], dy), torch.autograd.grad(wk, tensors[1], dy))


def test_factors_that_change_before_backward_are_noticed():
    tensors, cos, sin = inputs()
    q, _ = FusedRotary(refuse, form_of(modeling_llama.apply_rotary_pos_emb))(*tensors, cos, sin)
    cos.mul_(2)
    with pytest.raises(RuntimeError, match="changed in place"):
        q.sum().backward()


def test_second_derivatives_and_batched_gradients():
    function = modeling_llama.apply_rotary_pos_emb
    fused = FusedRotary(refuse, form_of(function))
    results = []
    for call in (fused, function):
        tensors, cos, sin = inputs()
        q, k = call(*tensors, cos, sin)
        first = torch.autograd.grad((q * k.repeat(1, 2, 1, 1)).float().pow(2).sum(), tensors, create_graph=True)
        second = torch.autograd.grad(sum(g.float().pow(2).sum() for g in first), tensors)
        q, _ = call(*tensors, cos, sin)
        many = torch.autograd.grad(q, tensors[0], torch.stack([q.detach(), -q.detach()]), is_grads_batched=True)
        results.append([*first, *second, *many])
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got.float(), want.float(), rtol=2e-2, atol=2e-2 * want.float().abs().max().item())


def test_results_may_be_changed_in_place():
    fused = FusedRotary(refuse, form_of(modeling_llama.apply_rotary_pos_emb))
    tensors, cos, sin = inputs()
    q, _ = fused(*tensors, cos, sin)
    q.mul_(2)
    want = modeling_llama.apply_rotary_pos_emb(*tensors, cos, sin)[0] * 2
    assert_same(torch.autograd.grad([q], tensors[:1], q), torch.autograd.grad([want], tensors[:1], want))


def test_whatever_the_pass_does_not_take_goes_to_the_function():
    function = modeling_llama.apply_rotary_pos_emb
    called = []

    def counted(*args, **kwargs):
        called.append(1)
        return function(*args, **kwargs)

    fused = FusedRotary(counted, form_of(function))
    (q, k), cos, sin = inputs()
    assert len(fused(q, k, cos, sin)) == 2 and not called
    for args in (
        (q.float(), k.float(), cos.float(), sin.float()), (q, k.half(), cos, sin), (q, k, cos.double(), sin.double()),
        (q, k, cos.requires_grad_(), sin),
    ):  # fmt: skip
        before = len(called)
        assert_same(fused(*args), function(*args))
        assert len(called) == before + 1
    (q, k), cos, sin = inputs()
    torch.func.vmap(lambda a, b: fused(a[None], b[None], cos[:1], sin[:1]))(q.detach(), k.detach())
    assert len(called) == 5
    fused(q=q, k=k, cos=cos, sin=sin)
    assert len(called) == 6


def rotate_more(q, k, cos, sin, unsqueeze_dim=1):
    q, k = modeling_llama.apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim)
    return q * 1.5, k


def rotate_back(q, k, cos, sin, unsqueeze_dim=1):
    return modeling_llama.apply_rotary_pos_emb(q, k, cos, -sin, unsqueeze_dim)


def rotate_without_gradient(q, k, cos, sin, unsqueeze_dim=1):
    q, k = modeling_llama.apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim)
    return q, k.detach() + 0 * k


@pytest.mark.parametrize("function", [rotate_more, rotate_back, rotate_without_gradient, refuse, torch.add, nn.Linear])
def test_another_function_is_not_taken_for_one(function):
    assert form_of(function) is None


def test_the_probe_leaves_the_random_state_alone():
    before = torch.get_rng_state()
    with torch.inference_mode():
        assert form_of.__wrapped__(modeling_llama.apply_rotary_pos_emb) is not None
    assert torch.equal(torch.get_rng_state(), before)


def apply_rotary(q, k, cos, sin, unsqueeze_dim=1):
    return modeling_llama.apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim)


class Attention(nn.Module):
    """An attention with a rotary embedding, in a file of the user's."""

    def __init__(self):
        super().__init__()
        self.q, self.kv, self.o = nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 64)
        self.register_buffer("angles", torch.randn(1, 32, 16, generator=torch.Generator().manual_seed(0)))

    def forward(self, x, *, causal: bool = True):
        q = self.q(x).view(*x.shape[:2], 4, 16).transpose(1, 2)
        k, v = self.kv(x).view(*x.shape[:2], 4, 16).transpose(1, 2).chunk(2, 1)
        angles = self.angles[:, : x.shape[1]]
        q, k = apply_rotary(q, k, angles.cos().to(q.dtype), angles.sin().to(q.dtype))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)
        return self.o(out.transpose(1, 2).flatten(2))


def renaming(old, new):
    """A decorator as transformers has it for arguments with a new name."""

    def decorate(function):
        @functools.wraps(function)
        def call(self, *args, **kwargs):
            if old in kwargs:
                kwargs[new] = kwargs.pop(old)
            return function(self, *args, **kwargs)

        return call

    return decorate


def passing_on(function):
    """A decorator that does not say what it wraps."""
    return lambda *args, **kwargs: function(*args, **kwargs)


class Renamed(Attention):
    forward = renaming("is_causal", "causal")(renaming("masked", "causal")(Attention.forward))


class PassedOn(Attention):
    forward = passing_on(Attention.forward)


def test_decorators_of_the_forward_stay(monkeypatch):
    torch.manual_seed(0)
    model, x = Renamed().to(HALF), torch.randn(2, 16, 64).to(HALF)
    want = {name: model(x, **{name: False}) for name in ("causal", "is_causal", "masked")}
    convert(model)
    calls = []
    whole = FusedRotary.__call__
    monkeypatch.setattr(FusedRotary, "__call__", lambda *args, **kw: calls.append(1) or whole(*args, **kw))
    for name, out in want.items():
        assert_same([model(x, **{name: False})], [model(x, causal=False)])
        torch.testing.assert_close(model(x, **{name: False}).float(), out.float(), rtol=0.1, atol=0.1)
    assert len(calls) == 9
    assert fused_class(type(model)) is None and fused_class(PassedOn) is None


def attention():
    torch.manual_seed(0)
    return nn.Sequential(Attention(), nn.LayerNorm(64), Attention()).to(HALF)


def run(model, how=lambda f, x: f(x), steps=2, histories=None):
    seen = []
    for step in range(steps):
        x = torch.randn(2, 16, 64, generator=torch.Generator().manual_seed(step)).to(HALF).requires_grad_()
        out = how(model, x)
        model.zero_grad()
        out.float().pow(2).sum().backward()
        seen += [out.detach(), x.grad, *(p.grad.clone() for p in model.parameters())]
        if histories is not None:
            histories.update()
    return seen


def test_reverting_gives_everything_back():
    model = attention()
    state = [(type(m), dict(m.__dict__)) for m in model.modules()]
    want = run(model)
    model.zero_grad()
    result, _ = convert(model)
    assert result.fused == dict.fromkeys(("0", "2"), "rotary embedding")
    assert type(model[0]) is fused_class(Attention) and isinstance(model[0], Attention)
    revert_layers(model)
    assert [(type(m), dict(m.__dict__)) for m in model.modules()] == state
    assert_same(run(model), want)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_and_pickles_compute_the_same_and_can_be_reverted(duplicate):
    model = attention()
    convert(model)
    twin = duplicate(model)
    assert type(twin[0]) is type(model[0])
    assert_same(run(twin, steps=1), run(model, steps=1))
    revert_layers(twin)
    assert type(twin[0]) is Attention and type(model[0]) is not Attention


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing(reentrant):
    model = attention()
    plain = copy.deepcopy(model)
    (_, histories), (_, plain_histories) = convert(model), convert(plain, fused=False)

    def how(f, x):
        return checkpoint(f, x, use_reentrant=reentrant)

    assert_same(run(model, how, histories=histories), run(plain, how, histories=plain_histories))


def test_compiled_code_is_the_modules_own(monkeypatch):
    model = attention()
    convert(model)
    run(model, steps=1)  # histories begin
    x = torch.randn(2, 16, 64).to(HALF)
    want = model(x)
    monkeypatch.setattr(FusedRotary, "__call__", refuse)
    torch._dynamo.reset()
    got = torch.compile(model, backend="aot_eager", fullgraph=True)(x)
    torch.testing.assert_close(got.float(), want.float(), rtol=5e-2, atol=5e-2)
    with pytest.raises(AssertionError, match="not fused"):
        model(x)


def test_a_name_that_changes_later_is_the_users(monkeypatch):
    model = attention()
    convert(model)
    monkeypatch.setitem(Attention.forward.__globals__, "apply_rotary", refuse)
    with pytest.raises(AssertionError, match="not fused"):
        model(torch.randn(2, 16, 64).to(HALF))


def test_only_beside_converted_layers():
    model = attention()
    result, _ = convert(model, skip=["0"])
    assert list(result.fused) == ["2"] and type(model[0]) is Attention
    assert result.unfused == {"0": "its linear layers are in half precision"}
    model = attention()
    result, _ = convert(model, skip=["0.q", "0.o"])
    assert list(result.fused) == ["0", "2"]


def test_a_forward_of_its_own_is_left():
    model = attention()
    model[0].forward = lambda x: x
    assert list(convert(model)[0].fused) == ["2"] and type(model[0]) is Attention


def test_other_formulas_are_named(monkeypatch):
    monkeypatch.setitem(Attention.forward.__globals__, "apply_rotary", rotate_more)
    fused_class.cache_clear()
    model = attention()
    result, _ = convert(model)
    fused_class.cache_clear()
    assert not result.fused and "another formula" in result.unfused["0"]

"""torch's attention and transformer blocks: the projections are the level's GEMMs, in training and in evaluation."""

import copy
import pickle
from contextlib import nullcontext

import pytest
import torch
from torch import nn

from nemo_lowprec.chart.groups import LayerFilter
from nemo_lowprec.chart.recipe import Recipe
from nemo_lowprec.compute import LowPrecisionLinear, ReferenceBackend, convert_layers, is_converted, revert_layers
from nemo_lowprec.compute.multihead import LowPrecisionMultiheadAttention
from nemo_lowprec.compute.operands import new_histories
from nemo_lowprec.formats import E4M3
from nemo_lowprec.tensors import Fp8Weight, Fp16Weight

HALF = torch.bfloat16
SIZE, HEADS, BATCH, QUERIES, KEYS = 32, 4, 3, 5, 7


def convert(model, scaling="current", histories=None, half_backend=None, **layers):
    recipe = Recipe(scaling) if scaling else None
    histories = new_histories(recipe) if recipe and histories is None else histories
    return convert_layers(model, HALF, recipe, ReferenceBackend(), half_backend, LayerFilter(**layers), histories)


def attention(**options):
    torch.manual_seed(0)
    module = nn.MultiheadAttention(SIZE, HEADS, **{"batch_first": True} | options)
    for name, param in module.named_parameters():
        if "bias" in name:  # zero at first
            nn.init.normal_(param, std=0.3)
    return module


def block(kind=nn.TransformerEncoderLayer, **options):
    torch.manual_seed(0)
    return kind(SIZE, HEADS, 64, **{"dropout": 0.0, "batch_first": True} | options)


def count_gemms(model, monkeypatch):
    """Counts the FP8 GEMMs of forward passes from now on."""
    calls = []
    fprop = ReferenceBackend.fprop
    monkeypatch.setattr(ReferenceBackend, "fprop", lambda self, *args: calls.append(1) or fprop(self, *args))
    return calls


def randn(*shape, seed=1):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


CAUSAL = torch.ones(QUERIES, QUERIES).triu(1).bool()
PADDING = torch.tensor([[False] * 5, [False] * 3 + [True] * 2, [False] * 4 + [True]])
OF_KEYS = torch.zeros(BATCH, KEYS).bool().index_fill_(1, torch.tensor([6]), True)
CALLS = {
    "self": ({}, "self", {}),
    "no weights": ({}, "self", {"need_weights": False}),
    "a weight for each head": ({}, "self", {"average_attn_weights": False}),
    "no bias": ({"bias": False}, "self", {}),
    "time first": ({"batch_first": False}, "self", {}),
    "time first without weights": ({"batch_first": False}, "memory", {"need_weights": False}),
    "memory": ({}, "memory", {}),
    "three tensors": ({}, "three", {}),
    "two are one": ({}, "query is key", {}),
    "other sizes": ({"kdim": 48, "vdim": 16}, "sizes", {}),
    "other sizes without bias or weights": ({"kdim": 48, "vdim": 16, "bias": False}, "sizes", {"need_weights": False}),
    "unbatched": ({}, "unbatched", {}),
    "unbatched, time first": ({"batch_first": False}, "unbatched", {"need_weights": False}),
    "causal": ({}, "self", {"attn_mask": CAUSAL, "is_causal": True, "need_weights": False}),
    "causal with weights": ({}, "self", {"attn_mask": CAUSAL, "is_causal": True}),
    "causal with padding": (
        {}, "self", {"attn_mask": CAUSAL, "is_causal": True, "need_weights": False, "key_padding_mask": PADDING},
    ),
    "masks of floats": ({}, "self", {"attn_mask": randn(QUERIES, QUERIES), "key_padding_mask": PADDING.float() * -5}),
    "a mask for each head": ({}, "memory", {"attn_mask": randn(BATCH * HEADS, QUERIES, KEYS), "need_weights": False}),
    "padding of keys": ({}, "memory", {"key_padding_mask": OF_KEYS}),
    "more keys": (
        {"add_bias_kv": True, "add_zero_attn": True}, "memory",
        {"key_padding_mask": OF_KEYS, "attn_mask": randn(QUERIES, KEYS) > 1},
    ),
    "a key of zeros": ({"add_zero_attn": True, "batch_first": False}, "self", {"need_weights": False}),
    "a key of weights": (
        {"add_bias_kv": True}, "self", {"need_weights": False, "attn_mask": CAUSAL, "is_causal": True},
    ),
}  # fmt: skip


def arguments(options, which):
    """Query, key and value."""
    lengths = {"q": (BATCH, QUERIES), "k": (BATCH, KEYS)}
    if not options.get("batch_first", True):
        lengths = {name: shape[::-1] for name, shape in lengths.items()}
    x, memory = randn(*lengths["q"], SIZE), randn(*lengths["k"], SIZE, seed=2)
    if which == "unbatched":
        x = x[0]
        return x, x, x
    other = randn(*lengths["k"], SIZE, seed=3)
    wide, narrow = randn(*lengths["k"], 48, seed=4), randn(*lengths["k"], 16, seed=5)
    found = {
        "self": (x, x, x), "memory": (x, memory, memory), "three": (x, memory, other), "query is key": (memory, memory,
        other), "sizes": (x, wide, narrow),
    }  # fmt: skip
    return found[which]


def results(module, given, call):
    """Outputs and weights, and the gradients of parameters and arguments."""
    leaves = {id(t): t.clone().requires_grad_() for t in given}
    sources = {key: leaf * 1 for key, leaf in leaves.items()}
    out, weights = module(*(sources[id(t)] for t in given), **call)
    loss = (out.float() * randn(*out.shape, seed=9)).sum()
    if weights is not None:
        loss = loss + (weights.float() * randn(*weights.shape, seed=8)).sum()
    module.zero_grad()
    loss.backward()
    grads = {name: p.grad for name, p in module.named_parameters()}
    found = {"out": out, "weights": weights, **grads, **{f"input {i}": t.grad for i, t in enumerate(leaves.values())}}
    return {name: t.detach().clone() for name, t in found.items() if t is not None}


def far(got, want):
    """The largest relative error of any result."""
    assert got.keys() == want.keys() and all(got[n].shape == want[n].shape for n in want)
    return max(float((got[n].float() - want[n]).norm() / want[n].norm().clamp_min(1e-3)) for n in want)


@pytest.mark.parametrize("name", CALLS)
def test_every_argument_means_what_it_did(name):
    options, which, call = CALLS[name]
    module, given = attention(**options), arguments(options, which)
    want = results(module, given, call)
    convert(module, None)
    assert type(module) is LowPrecisionMultiheadAttention and isinstance(module, nn.MultiheadAttention)
    assert far(results(module, given, call), want) < 1e-5
    module.eval()
    with torch.no_grad():
        out, weights = module(*given, **call)
    assert torch.equal(out, results(module.train(), given, call)["out"])
    assert (weights is None) == (not call.get("need_weights", True))


@pytest.mark.parametrize("name", CALLS)
def test_the_projections_are_fp8_gemms_and_agree_with_torch(name, monkeypatch):
    options, which, call = CALLS[name]
    module, given = attention(**options), arguments(options, which)
    want = results(module, given, call)
    result = convert(module)
    names = ["q_proj_weight", "k_proj_weight", "v_proj_weight"] if "kdim" in options else ["in_proj_weight"]
    assert result.low == [*names, "out_proj"] and result.weights == [*names, "out_proj.weight"] and not result.kept
    calls = count_gemms(module, monkeypatch)
    # A few percent for each operand's rounding.
    assert far(results(module, given, call), want) < 0.2
    assert len(calls) == 1 + len({"self": "1", "unbatched": "1", "memory": "12"}.get(which, "123"))


def test_one_tensor_is_projected_as_by_one_linear_layer():
    module, layer = attention(), nn.Linear(SIZE, 3 * SIZE)
    layer.load_state_dict({"weight": module.in_proj_weight, "bias": module.in_proj_bias})
    convert(module, "delayed"), convert(layer, "delayed")
    x = randn(BATCH, QUERIES, SIZE)
    got = torch.cat(module._project(x, x, x), -1)
    want = layer(x)
    assert torch.equal(got, want)
    got.square().sum().backward(), want.square().sum().backward()
    assert torch.equal(module.in_proj_weight.grad, layer.weight.grad)
    assert torch.equal(module.in_proj_bias.grad, layer.bias.grad)


@pytest.mark.parametrize("half_backend", [None, ReferenceBackend()])
@pytest.mark.parametrize("scaling", [None, "current", "rowwise", "blockwise"])
def test_a_memory_is_projected_as_by_layers_of_their_own(scaling, half_backend):
    """Also where weights are half with gradients in FP32, which rows of a weight must not lose."""
    module, layers = attention(), [nn.Linear(SIZE, SIZE * n) for n in (1, 2)]
    for layer, part in zip(layers, ((0, SIZE), (SIZE, 3 * SIZE)), strict=True):
        layer.load_state_dict(
            {"weight": module.in_proj_weight[slice(*part)], "bias": module.in_proj_bias[slice(*part)]}
        )
    for each in (module, *layers):
        each.bfloat16()
        for param in each.parameters():
            param.grad_dtype = torch.float32
        convert_layers(
            each,
            HALF,
            Recipe(scaling) if scaling else None,
            ReferenceBackend(),
            half_backend,
            LayerFilter(),
            None,
            True,
        )
    x, memory = randn(BATCH, QUERIES, SIZE).bfloat16(), randn(BATCH, KEYS, SIZE, seed=2).bfloat16()
    q, k, v = module._project(x, memory, memory)
    wanted = (layers[0](x), *layers[1](memory).chunk(2, -1))
    for got, want in zip((q, k, v), wanted, strict=True):
        assert torch.equal(got, want)
    (q.square().sum() + k.square().sum() + v.square().sum()).backward()
    sum(w.square().sum() for w in wanted).backward()
    assert module.in_proj_weight.grad.dtype == torch.float32
    assert torch.equal(module.in_proj_weight.grad, torch.cat([layer.weight.grad for layer in layers]))


@pytest.mark.parametrize("store", ["fp16", "fp8"])
def test_weights_that_are_stored_in_low_precision_are_projected_with(store):
    module, given = attention(), arguments({}, "memory")
    with torch.no_grad():
        rounded = Fp8Weight.from_float(module.in_proj_weight, E4M3, torch.float32)
        stored = rounded if store == "fp8" else Fp16Weight.from_float(module.in_proj_weight, torch.float32)
        module.in_proj_weight.copy_(stored.dequantize(torch.float32))
    want = results(module, given, {})
    module.in_proj_weight = nn.Parameter(stored)
    convert(module)
    assert far(results(module, given, {}), want) < 0.2


def test_every_weight_has_its_operands_in_the_histories():
    model, histories = block(nn.TransformerDecoderLayer), new_histories(Recipe("delayed"))
    result = convert(model, "delayed", histories=histories)
    assert result.weights == [
        "self_attn.in_proj_weight", "self_attn.out_proj.weight", "multihead_attn.in_proj_weight",
        "multihead_attn.out_proj.weight", "linear1.weight", "linear2.weight",
    ]  # fmt: skip
    kinds = ("input", "grad_output")  # weights have none
    assert list(histories.slots) == [f"{name}.{kind}" for name in result.low for kind in kinds]
    model(randn(BATCH, QUERIES, SIZE), randn(BATCH, KEYS, SIZE)).sum().backward()
    histories.update()
    assert not any(slot.cold for slot in histories.slots.values())
    before = histories.history.clone()
    with torch.no_grad():
        model.eval()(randn(BATCH, QUERIES, SIZE) * 9, randn(BATCH, KEYS, SIZE))
    assert not histories.amax.any() and torch.equal(histories.history, before)


@pytest.mark.parametrize("overrides", [(True, False, False), (False, True, False), (False, False, True)])
def test_a_gemm_that_is_overridden_is_one_of_these_too(overrides):
    module, given = attention(), arguments({}, "memory")
    want = results(module, given, {})
    recipe = Recipe("current", override_linear_precision=overrides)
    convert_layers(module, HALF, recipe, ReferenceBackend(), None, LayerFilter(), None)
    assert module.gemm_plans["in_proj_weight"].fp8 == tuple(not o for o in overrides)
    assert far(results(module, given, {}), want) < 0.2


# Evaluation


NO_GRAD = {"no_grad": torch.no_grad, "inference_mode": torch.inference_mode, "grad": nullcontext}
MODELS = {
    "attention": (lambda: attention(), lambda m, x: m(x, x, x)[0], 2),
    "attention without weights": (lambda: attention(), lambda m, x: m(x, x, x, need_weights=False)[0], 2),
    "layer": (lambda: block(), lambda m, x: m(x), 4),
    "gelu": (lambda: block(activation="gelu", norm_first=True), lambda m, x: m(x), 4),
    "encoder": (lambda: nn.TransformerEncoder(block(), 2), lambda m, x: m(x), 8),
    "padded": (lambda: nn.TransformerEncoder(block(), 2), lambda m, x: m(x, src_key_padding_mask=PADDING), 8),
    "transformer": (
        lambda: nn.Transformer(SIZE, HEADS, 1, 1, 64, 0.0, batch_first=True), lambda m, x: m(x, x * 0.5), 4 + 7,
    ),
}  # fmt: skip


@pytest.mark.parametrize("autocast", [False, True], ids=["plain", "autocast"])
@pytest.mark.parametrize("grad", NO_GRAD)
@pytest.mark.parametrize("name", MODELS)
def test_evaluation_calls_the_converted_layers(name, grad, autocast, monkeypatch):
    make, call, gemms = MODELS[name]
    model = make()
    convert(model)
    x = randn(BATCH, QUERIES, SIZE)
    calls = count_gemms(model, monkeypatch)
    with torch.autocast("cpu", HALF, enabled=autocast):
        want = call(model, x)
        assert len(calls) == gemms
        with NO_GRAD[grad]():
            got = call(model.eval(), x)
    assert len(calls) == 2 * gemms and torch.equal(got, want)


@pytest.mark.parametrize("name", MODELS)
def test_revert_gives_torchs_modules_back(name):
    make, call, _ = MODELS[name]
    model, x = make(), randn(BATCH, QUERIES, SIZE)
    before = {n: (type(m), dict(m.__dict__)) for n, m in model.named_modules()}
    params, state = list(model.parameters()), list(model.state_dict())
    with torch.no_grad():
        want = call(model.eval(), x)
    convert(model)
    assert is_converted(model) and list(model.state_dict()) == state
    assert all(a is b for a, b in zip(model.parameters(), params, strict=True))
    revert_layers(model)
    assert not is_converted(model)
    for n, module in model.named_modules():
        kind, attributes = before[n]
        assert type(module) is kind and module.__dict__ == attributes | {"training": False}
    with torch.no_grad():
        assert torch.equal(call(model, x), want)


def test_a_copy_and_a_pickle_evaluate_so_too_and_can_be_reverted():
    model, x = nn.TransformerEncoder(block(), 2).eval(), randn(BATCH, QUERIES, SIZE)
    convert(model)
    with torch.no_grad():
        want = model(x)
        for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert torch.equal(other(x), want)
            revert_layers(other)
            assert other.use_nested_tensor and other.layers[0].activation_relu_or_gelu == 1
            assert "gemm_plans" not in other.layers[0].self_attn.__dict__
            assert 0 < (other(x) - want).norm() < 0.1 * want.norm()


@pytest.mark.slow
def test_a_compiled_model_evaluates_so_too():
    model, x = nn.TransformerEncoder(block(), 2), randn(BATCH, QUERIES, SIZE)
    convert(model)
    compiled = torch.compile(model, backend="eager")
    want = model(x)
    assert torch.allclose(compiled(x), want)
    with torch.no_grad():
        assert torch.allclose(compiled.eval()(x), want)


# What is left alone


class Own(nn.MultiheadAttention):
    def forward(self, query, key, value, **options):
        out, weights = super().forward(query, key, value, **options)
        return out * 2, weights


class BatchFirst(nn.MultiheadAttention):
    """Has torch's forward."""

    def __init__(self):
        super().__init__(SIZE, HEADS, batch_first=True)


def test_an_attention_of_a_subclass_with_torchs_forward_is_converted():
    torch.manual_seed(0)
    model, x = BatchFirst(), randn(BATCH, QUERIES, SIZE)
    want = model(x, x, x)[0]
    assert convert(model).low == ["in_proj_weight", "out_proj"]
    assert isinstance(model, BatchFirst) and isinstance(model, LowPrecisionMultiheadAttention)
    got = model(x, x, x)[0]
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(other(x, x, x)[0], got)
    revert_layers(model)
    assert type(model) is BatchFirst and torch.equal(model(x, x, x)[0], want)


def test_an_attention_whose_weight_is_computed_is_left_alone():
    model, x = attention(), randn(BATCH, QUERIES, SIZE)
    nn.utils.parametrizations.spectral_norm(model, "in_proj_weight")
    before = [buffer.clone() for buffer in model.buffers()]
    assert not convert(model).low
    assert all(map(torch.equal, model.buffers(), before))
    assert torch.isfinite(model(x, x, x)[0]).all()


def test_an_attention_with_a_forward_of_its_own_is_left_alone_with_its_out_proj():
    model = nn.ModuleDict({"own": Own(SIZE, HEADS, batch_first=True), "plain": attention()})
    x = randn(BATCH, QUERIES, SIZE)
    want = model["own"](x, x, x)[0]
    result = convert(model)
    assert result.kept == {"own.out_proj": "Own may read its weight without calling it"}
    assert result.low == ["plain.in_proj_weight", "plain.out_proj"]
    assert type(model["own"]) is Own and torch.equal(model["own"](x, x, x)[0], want)


def test_filters_know_the_attention_by_its_name():
    def low(**layers):
        model = nn.ModuleDict({"body": nn.ModuleDict({"attn": attention(), "up": nn.Linear(SIZE, SIZE)})})
        return convert(model, **layers)

    inside, out = "body.attn.in_proj_weight", "body.attn.out_proj"
    assert low().low == [inside, out, "body.up"]
    assert low(skip=["body.attn"]).kept == {inside: "in skip", out: "in skip"}
    assert low(skip=["*.out_proj"]).low == [inside, "body.up"]
    assert low(convert=["*.attn"]).low == [inside]
    assert low(convert=["body.attn"]).low == [inside, out]
    assert low(convert=lambda name, module: isinstance(module, nn.MultiheadAttention)).low == [inside]


def test_blocks_that_stay_in_half_precision_keep_their_attention():
    encoder = nn.TransformerEncoder(block(), 3)
    result = convert(encoder, num_layers_at_start_in_half=1, num_layers_at_end_in_half=1)
    assert {name.split(".")[1] for name in result.low} == {"1"} and len(result.low) == 4
    assert "layers.0.self_attn.in_proj_weight" in result.kept


def test_a_size_that_no_gemm_takes_leaves_that_projection_alone():
    module = nn.MultiheadAttention(SIZE, HEADS, kdim=30, vdim=16, batch_first=True)
    result = convert(module, half_backend=ReferenceBackend())
    assert result.low == ["q_proj_weight", "v_proj_weight", "out_proj"] and result.half == ["k_proj_weight"]
    assert result.kept == {"k_proj_weight": "a side of 30 is no multiple of 16"}
    given = (randn(2, 5, SIZE), randn(2, 7, 30), randn(2, 7, 16))
    assert torch.isfinite(module(*given)[0]).all()


def test_layers_of_that_kind_without_an_attention_are_converted():
    layer = nn.modules.linear.NonDynamicallyQuantizableLinear(SIZE, SIZE)
    assert convert(layer).low == [""] and type(layer) is LowPrecisionLinear


@pytest.mark.parametrize(
    ("given", "error", "says"),
    [
        ({"is_causal": True}, RuntimeError, "Pass attn_mask, too"),
        ({"attn_mask": torch.zeros(4, 4)}, RuntimeError, r"attn_mask has the shape \(4, 4\)"),
        ({"key_padding_mask": torch.zeros(BATCH, 4)}, RuntimeError, "key_padding_mask has the shape"),
        ({"query": torch.zeros(QUERIES, SIZE)}, ValueError, r"have \[2, 3, 3\] dimensions"),
    ],
)
def test_bad_arguments(given, error, says):
    module, x = attention(), randn(BATCH, QUERIES, SIZE)
    convert(module)
    with pytest.raises(error, match=says):
        module(**{"query": x, "key": x, "value": x, **given})


def test_nested_tensors_are_refused():
    module = attention().eval()
    convert(module)
    x = torch.nested.nested_tensor([torch.randn(3, SIZE), torch.randn(5, SIZE)])
    with pytest.raises(ValueError, match="takes no nested tensors"), torch.no_grad():
        module(x, x, x)
